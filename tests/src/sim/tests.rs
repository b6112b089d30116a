//! Is the simulation true to what is known of the real libraries?

use std::{
    collections::{BTreeSet, HashSet},
    env, fs,
    os::unix::process::ExitStatusExt,
    path::Path,
    process::Command,
    thread,
    time::Duration,
};

use object::{
    Object, ObjectSection, ObjectSegment, ObjectSymbol,
    read::elf::{ElfFile64, FileHeader},
};

use super::{Running, Sim, SimDevice, truth};

const MIB: u64 = 1 << 20;
const CONTEXT: u64 = 500 * MIB;

fn sim() -> Sim {
    Sim::build().unwrap()
}

fn device() -> SimDevice {
    sim().device().unwrap()
}

fn ready(device: &SimDevice, name: &str, args: &[&str]) -> (Running, Vec<String>) {
    let mut program = device.start(name, args).unwrap();
    let lines = program.until_ready().unwrap();
    (program, lines)
}

/// (name, address, first byte, file offset) of each exported function.
fn exports(library: &Path) -> Vec<(String, u64, u8, u64)> {
    let data = fs::read(library).unwrap();
    let file = ElfFile64::<object::Endianness>::parse(&*data).unwrap();
    assert!(file.elf_header().is_little_endian());
    let text = file.section_by_name(".text").unwrap();
    let (bytes, base) = (text.data().unwrap(), text.address());
    let segment = file.segments().find(|s| (s.address()..s.address() + s.size()).contains(&base));
    let (segment_base, (segment_offset, _)) =
        segment.map(|s| (s.address(), s.file_range())).unwrap();
    let defined = file.dynamic_symbols().filter(ObjectSymbol::is_definition);
    defined
        .map(|symbol| {
            let address = symbol.address();
            let first = bytes[usize::try_from(address - base).unwrap()];
            let offset = address - segment_base + segment_offset;
            (symbol.name().unwrap().to_owned(), address, first, offset)
        })
        .collect()
}

const DRIVER: &str = "
    cuInit cuDriverGetVersion cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceGetUuid
    cuDeviceGetUuid_v2 cuDeviceTotalMem_v2 cuDeviceGetAttribute cuDeviceGetPCIBusId
    cuGetProcAddress cuGetProcAddress_v2 cuGetErrorName cuGetErrorString
    cuCtxCreate_v2 cuCtxCreate_v3 cuCtxCreate_v4 cuCtxDestroy_v2 cuCtxSetCurrent cuCtxGetCurrent
    cuCtxPushCurrent_v2 cuCtxPopCurrent_v2 cuCtxGetDevice cuCtxSynchronize
    cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease cuDevicePrimaryCtxRelease_v2
    cuDevicePrimaryCtxReset cuDevicePrimaryCtxReset_v2
    cuMemAlloc_v2 cuMemAllocPitch_v2 cuMemAllocManaged cuMemFree_v2 cuMemGetInfo_v2
    cuMemGetAddressRange_v2
    cuMemAllocAsync cuMemAllocAsync_ptsz cuMemAllocFromPoolAsync cuMemAllocFromPoolAsync_ptsz
    cuMemFreeAsync cuMemFreeAsync_ptsz cuDeviceGetDefaultMemPool cuDeviceGetMemPool
    cuDeviceSetMemPool cuMemPoolCreate cuMemPoolDestroy cuMemPoolTrimTo cuMemPoolSetAttribute
    cuMemPoolGetAttribute
    cuMemCreate cuMemRelease cuMemMap cuMemUnmap cuMemSetAccess cuMemRetainAllocationHandle
    cuMemExportToShareableHandle cuMemImportFromShareableHandle cuMemAddressReserve
    cuMemAddressFree cuMemGetAllocationGranularity
    cuMemHostAlloc cuMemAllocHost_v2 cuMemFreeHost cuMemHostRegister_v2 cuMemHostUnregister
    cuStreamCreate cuStreamDestroy_v2 cuStreamSynchronize cuStreamSynchronize_ptsz
    cuStreamBeginCapture_v2 cuStreamBeginCapture_v2_ptsz cuStreamBeginCaptureToGraph
    cuStreamBeginCaptureToGraph_ptsz cuStreamEndCapture cuStreamEndCapture_ptsz
    cuModuleGetFunction cuLibraryGetKernel cuLibraryGetModule cuKernelGetFunction cuFuncLoad
    cuArray3DCreate cuArray3DCreate_v2 cuArrayCreate cuArrayCreate_v2 cuArrayDestroy
    cuCheckpointProcessCheckpoint cuCheckpointProcessGetState cuCheckpointProcessLock
    cuCheckpointProcessRestore cuCheckpointProcessUnlock cuCtxAttach cuCtxCreate cuCtxDestroy
    cuCtxDetach cuCtxFromGreenCtx cuCtxGetLimit cuCtxPopCurrent cuCtxPushCurrent cuCtxSetLimit
    cuDestroyExternalMemory cuDevResourceGenerateDesc cuDeviceGetByPCIBusId
    cuDeviceGetDevResource cuDeviceGetGraphMemAttribute cuDeviceGraphMemTrim
    cuExternalMemoryGetMappedBuffer cuExternalMemoryGetMappedMipmappedArray
    cuGraphAddMemAllocNode cuGraphAddMemFreeNode cuGraphAddNode cuGraphAddNode_v2
    cuGraphAddNode_v3 cuGraphCreate cuGraphDestroy cuGraphExecDestroy cuGraphInstantiate
    cuGraphInstantiateWithFlags cuGraphInstantiateWithParams cuGraphInstantiateWithParams_ptsz
    cuGraphInstantiate_v2 cuGraphLaunch cuGraphLaunch_ptsz cuGraphUpload cuGraphUpload_ptsz
    cuGraphicsMapResources cuGraphicsMapResources_ptsz cuGraphicsResourceGetMappedPointer_v2
    cuGraphicsUnmapResources cuGraphicsUnmapResources_ptsz cuGreenCtxCreate cuGreenCtxDestroy
    cuImportExternalMemory cuIpcCloseMemHandle cuIpcGetMemHandle cuIpcOpenMemHandle
    cuIpcOpenMemHandle_v2 cuLibraryGetGlobal cuLibraryLoadData cuLibraryLoadFromFile
    cuLibraryUnload cuMemAlloc cuMemAllocHost cuMemAllocPitch cuMemFree cuMemGetDefaultMemPool
    cuMemGetHandleForAddressRange cuMemGetMemPool cuMemHostRegister cuMemMapArrayAsync
    cuMemMapArrayAsync_ptsz cuMemPoolExportPointer cuMemPoolExportToShareableHandle
    cuMemPoolImportFromShareableHandle cuMemPoolImportPointer cuMemSetMemPool
    cuMipmappedArrayCreate cuMipmappedArrayDestroy cuModuleGetGlobal_v2 cuModuleLoad
    cuModuleLoadData cuModuleLoadDataEx cuModuleLoadFatBinary cuModuleUnload
    cuMulticastAddDevice cuMulticastBindAddr cuMulticastBindAddr_v2 cuMulticastBindMem
    cuMulticastBindMem_v2 cuMulticastCreate cuMulticastGetGranularity cuMulticastUnbind";

const RUNTIME: &str = "
    cudaMalloc cudaFree cudaMallocAsync cudaFreeAsync cudaMallocHost cudaHostAlloc cudaFreeHost
    cudaMallocManaged cudaMallocPitch cudaHostRegister cudaHostUnregister cudaSetDevice
    cudaGetDevice cudaGetDeviceCount cudaDeviceReset cudaDeviceSynchronize cudaMemGetInfo
    cudaStreamCreate cudaStreamDestroy cudaStreamSynchronize cudaGetLastError
    cudaDeviceGetDefaultMemPool cudaMemPoolSetAttribute cudaMemPoolGetAttribute";

const C10: &str = "
    _ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE
    _ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE";

const C10_CUDA: &str = "
    sim_torch_alloc sim_torch_free sim_torch_empty_cache sim_torch_allocated sim_torch_reserved
    sim_torch_peak";

const TORCH_CPU: &str = "
    _ZN5torch8autograd6Engine7executeERKSt6vectorINS0_4EdgeESaIS3_EERKS2_IN2at6TensorESaIS9_EEbbbS7_
    _ZN5torch8autograd9generated12MulBackward05applyEOSt6vectorIN2at6TensorESaIS5_EE
    _ZN5torch8autograd9generated11MmBackward05applyEOSt6vectorIN2at6TensorESaIS5_EE
    _ZN5torch8autograd9generated16NllLossBackward05applyEOSt6vectorIN2at6TensorESaIS5_EE
    sim_torch_backward";

/// Each with its second name, for profilers.
const NCCL: &str = "
    ncclGetUniqueId ncclCommInitRank ncclCommInitRankConfig ncclCommInitRankScalable ncclCommDestroy
    pncclGetUniqueId pncclCommInitRank pncclCommInitRankConfig pncclCommInitRankScalable
    pncclCommDestroy";

const LIBRARIES: [(&str, &str); 6] = [
    ("libcuda.so.1", DRIVER),
    ("libcudart.so.12", RUNTIME),
    ("libc10.so", C10),
    ("libc10_cuda.so", C10_CUDA),
    ("libtorch_cpu.so", TORCH_CPU),
    ("libnccl.so.2", NCCL),
];

#[test]
fn libraries_export_the_real_names_and_no_other() {
    for (library, names) in LIBRARIES {
        let exported = exports(&sim().lib_dir.join(library));
        let found: BTreeSet<_> = exported.iter().map(|(name, ..)| name.as_str()).collect();
        let wanted: BTreeSet<_> = names.split_whitespace().collect();
        assert_eq!(found, wanted, "{library}");
        let addresses: HashSet<_> = exported.iter().map(|(_, address, ..)| address).collect();
        let functions = names.split_whitespace().filter(|name| !name.starts_with("pnccl")).count();
        assert_eq!(addresses.len(), functions, "{library}: two functions share an address");
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn every_export_begins_with_push_rbp() {
    for (library, _) in LIBRARIES {
        for (name, _, first, _) in exports(&sim().lib_dir.join(library)) {
            assert_eq!(first, 0x55, "{library}: {name}");
        }
    }
}

#[test]
fn addresses_of_libcuda_are_not_file_offsets() {
    for (name, address, _, offset) in exports(&sim().lib_dir.join("libcuda.so.1")) {
        assert_ne!(address, offset, "{name}");
    }
}

#[test]
fn libcuda_has_no_symbol_table_but_the_dynamic_one() {
    let data = fs::read(sim().lib_dir.join("libcuda.so.1")).unwrap();
    let file = ElfFile64::<object::Endianness>::parse(&*data).unwrap();
    assert_eq!(file.symbols().count(), 0);
}

#[test]
fn static_runtime_has_no_name_to_probe() {
    let data = fs::read(sim().bin_dir.join("runtime_static")).unwrap();
    let file = ElfFile64::<object::Endianness>::parse(&*data).unwrap();
    let dynamic = file.dynamic_symbols().filter_map(|s| s.name().ok()).collect::<Vec<_>>();
    assert!(!dynamic.iter().any(|name| name.starts_with("cuda")), "{dynamic:?}");
    let local = file.symbols().find(|s| s.name() == Ok("cudaMalloc")).unwrap();
    assert!(local.is_local());
}

#[test]
fn small_blocks_share_pages_and_freed_ones_give_them_back() {
    let device = device();
    let (mut hold, lines) = ready(&device, "hold", &["65536", "33"]);
    assert_eq!(truth::live(&lines).len(), 33);
    let charged = |device: &SimDevice, pid| device.smi().unwrap().process_bytes(0, pid).unwrap();
    assert_eq!(charged(&device, hold.pid()), CONTEXT + 4 * MIB);
    hold.step("free").unwrap();
    assert_eq!(charged(&device, hold.pid()), CONTEXT + 2 * MIB);
    hold.step(&format!("alloc {}", 3 * MIB)).unwrap();
    assert_eq!(charged(&device, hold.pid()), CONTEXT + 6 * MIB);
}

#[test]
fn last_freed_address_is_given_out_first() {
    let device = device();
    let (mut hold, lines) = ready(&device, "hold", &["65536", "8"]);
    let freed = truth::live(&lines)[7].addr;
    hold.step("free").unwrap();
    let lines = hold.step("alloc 50000").unwrap();
    assert_eq!(truth::live(&lines)[7].addr, freed);
    assert!((1 << 46..1 << 47).contains(&freed), "{freed:#x}");
}

#[test]
fn full_gpu_refuses_and_a_killed_process_makes_room() {
    let device = device().memory_mib(1024);
    let size = (64 * MIB).to_string();
    let (mut hold, lines) = ready(&device, "hold", &[&size, "10"]);
    assert_eq!(truth::made(&lines), Some(truth::Made { allocs: 8, frees: 0, failed: 2 }));
    hold.kill().unwrap();
    let (hold, lines) = ready(&device, "hold", &[&size, "8"]);
    assert_eq!(truth::made(&lines), Some(truth::Made { allocs: 8, frees: 0, failed: 0 }));
    let smi = device.smi().unwrap();
    assert_eq!(smi.gpus[0].processes, [(hold.pid(), CONTEXT + 512 * MIB)]);
    assert_eq!(smi.gpus[0].used_bytes, CONTEXT + 512 * MIB);
    assert_eq!(smi.gpus[0].total_bytes, smi.gpus[0].reserved_bytes + 1024 * MIB);
}

#[test]
fn failed_calls_write_nothing() {
    let device = device();
    for name in ["failed", "every_row"] {
        let (program, lines) = ready(&device, name, &[]);
        assert!(truth::made(&lines).unwrap().failed > 0, "{name}");
        drop(program);
    }
}

#[test]
fn every_row_closes_all_that_it_opens() {
    let device = device();
    let (mut program, lines) = ready(&device, "every_row", &[]);
    let made = truth::made(&lines).unwrap();
    assert_eq!(made.allocs, made.frees);
    let pid = program.pid();
    let heap = 16 * MIB; // more than a context has without being asked, until it ends
    assert_eq!(device.smi().unwrap().process_bytes(0, pid), Some(CONTEXT + heap));
    program.step("").unwrap();
    assert_eq!(device.smi().unwrap().process_bytes(0, pid), None);
}

#[test]
fn threads_leave_exactly_what_they_keep() {
    for mode in ["sync", "async"] {
        let device = device();
        let (threads, lines) = ready(&device, "threads", &["64", "20000", mode, "2"]);
        let live = truth::live(&lines);
        let addresses: HashSet<_> = live.iter().map(|block| block.addr).collect();
        assert_eq!((live.len(), addresses.len()), (128, 128));
        let charged = device.smi().unwrap().process_bytes(0, threads.pid()).unwrap();
        assert!(charged >= CONTEXT + 128 * MIB, "{mode}: {charged}");
        let time = truth::line(&lines, "TIME").unwrap();
        let ns: f64 = truth::field(time, "cpu_ns_per_pair").unwrap();
        assert!(ns < 2000.0, "{mode}: {ns} ns for a pair");
    }
}

#[test]
fn contexts_take_their_blocks_with_them() {
    let device = device();
    let (mut ctx, _) = ready(&device, "ctx", &[]);
    let charged = |ctx: &Running| device.smi().unwrap().process_bytes(0, ctx.pid()).unwrap();
    assert_eq!(charged(&ctx), 2 * CONTEXT + (10 + 6 + 12) * MIB); // 5 MiB of a pool take 6
    let mut steps = Vec::new();
    for _ in 0..4 {
        let lines = ctx.step("").unwrap();
        steps.push((charged(&ctx), truth::live(&lines).len()));
    }
    let expected = [
        (CONTEXT + 18 * MIB, 2),
        (2 * CONTEXT + 32 * MIB, 3),
        (2 * CONTEXT + 26 * MIB, 2),
        (CONTEXT + 12 * MIB, 1),
    ];
    assert_eq!(steps, expected);
}

#[test]
fn shared_memory_lives_until_its_last_user_lets_go() {
    let device = device();
    let (mut nccl, lines) = ready(&device, "vmm_nccl", &["8"]);
    let child: u32 = truth::line(&lines, "CHILD").unwrap()[6..].parse().unwrap();
    let smi = device.smi().unwrap();
    for (gpu, pid) in [(0, nccl.pid()), (1, child)] {
        assert_eq!(smi.process_bytes(gpu, pid), Some(CONTEXT + 8 * 4 * MIB));
    }
    let lines = nccl.step("").unwrap();
    for line in lines.iter().filter(|line| line.starts_with("REFS")) {
        let count = |name| truth::field::<u64>(line, name).unwrap();
        assert_eq!(count("created") + count("retained") + count("imported"), count("released"));
    }
    let smi = device.smi().unwrap();
    for (gpu, pid) in [(0, nccl.pid()), (1, child)] {
        assert_eq!(smi.process_bytes(gpu, pid), Some(CONTEXT));
        assert_eq!(smi.gpus[gpu].used_bytes, CONTEXT);
    }
}

#[test]
fn imported_memory_outlives_the_process_that_made_it() {
    let device = device();
    let (nccl, lines) = ready(&device, "vmm_nccl", &["8"]);
    let child = &truth::line(&lines, "CHILD").unwrap()[6..];
    assert!(Command::new("kill").args(["-9", child]).status().unwrap().success());
    let of_the_importer = 8 * 4 * MIB;
    let orphaned = |smi: &truth::Smi| {
        (smi.gpus[1].used_bytes, smi.gpus[1].processes.len()) == (of_the_importer, 0)
    };
    assert!(eventually(|| orphaned(&device.smi().unwrap())), "{:?}", device.smi());
    drop(nccl);
    assert_eq!(device.smi().unwrap().gpus[1].used_bytes, 0);
}

/// NVML's figures: of GPU 0, of the process that exports, of the one that imports.
type Figures = (u64, Option<u64>, Option<u64>);

/// `share` to its end: figures and live blocks at each READY.
fn shared(first: &str) -> (Vec<Figures>, Vec<Vec<truth::Live>>) {
    let device = device();
    let (mut share, lines) = ready(&device, "share", &[first]);
    let pid = |word| truth::line(&lines, word).unwrap()[9..].parse().unwrap();
    let (exporter, importer) = (pid("EXPORTER"), pid("IMPORTER"));
    let figures = || {
        let smi = device.smi().unwrap();
        let of = |pid| smi.process_bytes(0, pid);
        (smi.gpus[0].used_bytes, of(exporter), of(importer))
    };
    let (mut all, mut live) = (vec![figures()], vec![truth::live(&lines)]);
    for _ in 0..2 {
        live.push(truth::live(&share.step("").unwrap()));
        all.push(figures());
    }
    let (_, status) = share.finish().unwrap();
    assert!(status.success());
    assert!(eventually(|| device.smi().unwrap().gpus[0].used_bytes == 0));
    (all, live)
}

const SHARED: u64 = (6 + 4 + 2) * MIB;

#[test]
fn what_three_ways_share_outlives_the_exporter() {
    let (figures, live) = shared("exporter-first");
    let expected = [
        (2 * CONTEXT + SHARED, Some(CONTEXT + SHARED), Some(CONTEXT)),
        (CONTEXT + SHARED, None, Some(CONTEXT)),
        (CONTEXT, None, Some(CONTEXT)),
    ];
    assert_eq!(figures, expected);
    assert_eq!(live.iter().map(Vec::len).collect::<Vec<_>>(), [6, 3, 0]);
    assert!(live[1].iter().all(|block| block.level == "imported"));
}

#[test]
fn what_three_ways_share_is_the_exporters_alone_after_the_importer() {
    let (figures, live) = shared("importer-first");
    let expected = [
        (2 * CONTEXT + SHARED, Some(CONTEXT + SHARED), Some(CONTEXT)),
        (CONTEXT + SHARED, Some(CONTEXT + SHARED), None),
        (CONTEXT, Some(CONTEXT), None),
    ];
    assert_eq!(figures, expected);
    let levels: Vec<_> = live[1].iter().map(|block| block.level.as_str()).collect();
    assert_eq!(levels, ["device", "device", "pool"]);
}

#[test]
fn every_export_is_given_out_from_its_version_on() {
    let exported = exports(&sim().lib_dir.join("libcuda.so.1"));
    let names: Vec<_> = exported.iter().map(|(name, ..)| name.as_str()).collect();
    let output = device().program("proc_address").args(&names).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let since = |name: &str| {
        let line = said.lines().find(|line| line.starts_with(&format!("SINCE {name} ")));
        truth::field::<u32>(line.unwrap(), "version").unwrap()
    };
    let never: Vec<_> = names.iter().filter(|name| since(name) == 0).collect();
    assert!(never.is_empty(), "{never:?}");
    let of_families = [
        ("cuMemAlloc", 2000),
        ("cuMemAlloc_v2", 3020),
        ("cuIpcOpenMemHandle", 4010),
        ("cuIpcOpenMemHandle_v2", 11000),
        ("cuMemHostRegister_v2", 6050),
        ("cuArray3DCreate_v2", 3020),
        ("cuGraphAddNode", 12020),
        ("cuGraphAddNode_v2", 12030),
        ("cuGraphAddNode_v3", 13040),
        ("cuGraphInstantiateWithParams_ptsz", 12000),
        ("cuMulticastBindMem", 12010),
        ("cuMulticastBindMem_v2", 13010),
        ("cuMemGetMemPool", 13000),
        ("cuGreenCtxCreate", 12040),
        ("cuCheckpointProcessCheckpoint", 12080),
    ];
    for (name, version) in of_families {
        assert_eq!(since(name), version, "{name}");
    }
}

#[test]
fn each_kind_of_thing_takes_what_it_says() {
    let device = device();
    let (mut costs, mut lines) = ready(&device, "costs", &[]);
    let mut steps = 0;
    while let Some(step) = truth::line(&lines, "STEP") {
        let bytes: u64 = truth::field(step, "bytes").unwrap();
        let charged = device.smi().unwrap().process_bytes(0, costs.pid());
        assert_eq!(charged, Some(CONTEXT + bytes), "{step}");
        // What an open descriptor keeps is the GPU's, and no process's.
        let kept = if step.contains("range-freed") { 4 * MIB } else { 0 };
        assert_eq!(device.smi().unwrap().gpus[0].used_bytes, CONTEXT + bytes + kept, "{step}");
        steps += 1;
        if step.contains("range-closed") {
            break;
        }
        lines = costs.step("").unwrap();
    }
    assert_eq!(steps, 20);
    assert!(costs.finish().unwrap().1.success());
}

#[test]
fn a_checkpoint_takes_a_process_off_its_gpu_and_back() {
    let device = device();
    let (mut hold, _) = ready(&device, "hold", &["67108864", "2"]);
    let pid = hold.pid().to_string();
    let (mut costs, _) = ready(&device, "costs", &["checkpoint", &pid]);
    let gpu = |device: &SimDevice| device.smi().unwrap().gpus[0].clone();
    assert_eq!(gpu(&device).used_bytes, 0);
    costs.step("").unwrap();
    let used = CONTEXT + 128 * MIB;
    assert_eq!(gpu(&device).processes, [(hold.pid(), used)]);
    hold.step("free").unwrap();
    assert_eq!(gpu(&device).used_bytes, used - 64 * MIB);
}

#[test]
fn every_row_says_nothing_is_left_out() {
    let output = device().program("every_row").arg("straight").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(!said.contains("CALL-SKIPPED"), "{said}");
}

#[test]
fn instances_are_parts_of_gpus() {
    let device = device().memory_mib(6 * 1024).set("SIM_MIG", "3");
    let instances = |smi: &truth::Smi, gpu: usize| smi.gpus[gpu].instances.clone();
    let wanted = instances(&device.smi().unwrap(), 1)[2].uuid.clone();
    assert!(wanted.starts_with("MIG-"), "{wanted}");
    let mut command = device.program("hold");
    command.args([(64 * MIB).to_string(), "1".into()]).env("CUDA_VISIBLE_DEVICES", &wanted);
    let mut hold = Running::start(command).unwrap();
    hold.until_ready().unwrap();
    let smi = device.smi().unwrap();
    let used = CONTEXT + 64 * MIB;
    let of_instances: Vec<_> = instances(&smi, 1).iter().map(|part| part.used_bytes).collect();
    assert_eq!(of_instances, [0, 0, used]);
    assert!(instances(&smi, 1).iter().all(|part| part.total_bytes == 2048 * MIB));
    assert_eq!((smi.gpus[0].used_bytes, smi.gpus[1].used_bytes), (0, used));
    assert_eq!(smi.gpus[1].processes, [(hold.pid(), used)]);
    // An instance is full where the GPU is not.
    let lines = hold.step(&format!("alloc {}", 3072 * MIB)).unwrap();
    assert_eq!(truth::made(&lines).unwrap().failed, 1);
}

#[test]
fn nvml_names_the_server_of_mps_and_processes_that_are_gone() {
    let device = device().set("SIM_NVML_MPS", "77").set("SIM_NVML_VANISHED", "88:100");
    let (hold, _) = ready(&device, "hold", &["67108864", "1"]);
    let gpu = &device.smi().unwrap().gpus[0];
    let used = CONTEXT + 64 * MIB;
    assert_eq!(gpu.processes, [(77, used), (88, 100 * MIB)]);
    assert_eq!(gpu.mps_processes, [(hold.pid(), used)]);
    assert_eq!(gpu.used_bytes, used + 100 * MIB);
}

fn eventually(condition: impl Fn() -> bool) -> bool {
    (0..100).any(|_| condition() || (thread::sleep(Duration::from_millis(20)), false).1)
}

#[test]
fn child_of_fork_owns_what_it_makes_itself() {
    let held = |mode: &str| {
        let device = device();
        let (program, lines) = ready(&device, "fork_child", &[mode]);
        let child = truth::line(&lines, "CHILD").unwrap()[6..].parse().unwrap();
        let smi = device.smi().unwrap();
        (smi.process_bytes(0, program.pid()), smi.process_bytes(0, child))
    };
    let parent = Some(CONTEXT + 32 * MIB);
    assert_eq!(held("before"), (parent, Some(CONTEXT + 24 * MIB)));
    assert_eq!(held("after"), (parent, None));
    assert_eq!(held("exec"), (parent, Some(CONTEXT + 24 * MIB)));
}

#[test]
fn exec_gives_back_what_the_old_image_held() {
    let device = device();
    let (mut hold, _) = ready(&device, "hold", &["16777216", "4"]);
    hold.step("exec 33554432").unwrap();
    let charged = device.smi().unwrap().process_bytes(0, hold.pid());
    assert_eq!(charged, Some(CONTEXT + 32 * MIB));
}

#[test]
fn kill_in_the_middle_of_allocations_leaves_nothing_behind() {
    let device = device().context_mib(1);
    for round in 0..20 {
        let mut threads = device.start("threads", &["4", "100000000"]).unwrap();
        thread::sleep(Duration::from_millis(20 + round * 3));
        threads.kill().unwrap();
    }
    assert!(device.smi().unwrap().gpus.iter().all(|gpu| gpu.used_bytes == 0));
}

#[test]
fn visible_devices_select_and_order_the_gpus() {
    let device = device().gpus(3);
    let uuids: Vec<_> = device.smi().unwrap().gpus.into_iter().map(|gpu| gpu.uuid).collect();
    let gpu_of = |visible: &str, order: &str| {
        let mut command = device.program("hold");
        command.env("CUDA_VISIBLE_DEVICES", visible).env("SIM_CUDA_ORDER", order);
        let mut hold = Running::start(command).unwrap();
        hold.until_ready().ok()?;
        let smi = device.smi().unwrap();
        (0..3).find(|&gpu| smi.process_bytes(gpu, hold.pid()).is_some())
    };
    assert_eq!(gpu_of("2", ""), Some(2));
    assert_eq!(gpu_of("1,0", ""), Some(1));
    assert_eq!(gpu_of(&uuids[1][..12], ""), Some(1));
    assert_eq!(gpu_of("0", "reverse"), Some(2));
    for none in ["", "-1,0", "7", "1,1", "GPU-"] {
        assert_eq!(gpu_of(none, ""), None, "{none:?}");
    }
}

#[test]
fn runtime_calls_arrive_at_the_driver_however_it_is_linked() {
    for name in ["runtime_shared", "runtime_static"] {
        let device = device();
        let (mut program, lines) = ready(&device, name, &[]);
        let reserved: u64 = truth::field(truth::line(&lines, "POOL").unwrap(), "reserved").unwrap();
        let charged = |pid| device.smi().unwrap().process_bytes(0, pid);
        assert_eq!(charged(program.pid()), Some(CONTEXT + 10 * MIB + reserved), "{name}");
        program.step("").unwrap(); // reset: the pool alone is left
        assert_eq!(charged(program.pid()), Some(reserved), "{name}");
    }
}

#[test]
fn caching_allocator_reports_what_it_holds() {
    let device = device();
    let (mut torch, lines) = ready(&device, "torch_like", &["20", "1"]);
    let total = |lines: &[String], name| {
        truth::field::<u64>(truth::line(lines, "TORCH").unwrap(), name).unwrap()
    };
    let live: u64 = truth::live(&lines).iter().map(|block| block.size_bytes).sum();
    assert_eq!(total(&lines, "allocated"), live);
    assert!(total(&lines, "peak") > live);
    let charged = |pid| device.smi().unwrap().process_bytes(1, pid).unwrap();
    assert_eq!(charged(torch.pid()), CONTEXT + total(&lines, "reserved"));
    let after = torch.step("").unwrap();
    assert_eq!(total(&after, "allocated"), live);
    assert!(total(&after, "reserved") < total(&lines, "reserved"));
    assert_eq!(charged(torch.pid()), CONTEXT + total(&after, "reserved"));
}

#[test]
fn leaky_rank_keeps_a_tensor_in_each_step_and_the_others_none() {
    let device = device();
    let mut command = device.program("leak_job.py");
    let output = command.args(["--seconds", "1"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let of_ranks: Vec<_> = text.lines().filter(|line| line.starts_with("TRUE")).collect();
    assert_eq!(of_ranks.len(), 4, "{text}");
    for line in of_ranks {
        let number = |name| truth::field::<u64>(line, name).unwrap();
        let kept = if number("rank") == 2 { number("steps") } else { 0 };
        assert_eq!(number("kept_tensors"), kept, "{line}");
        assert_eq!(number("kept_bytes"), kept * 12 * MIB, "{line}");
    }
}

#[test]
fn library_opened_late_works() {
    let device = device();
    let (mut program, _) = ready(&device, "dlopen_late", &[]);
    assert_eq!(device.smi().unwrap().process_bytes(0, program.pid()), None);
    let lines = program.step("").unwrap();
    assert_eq!(truth::live(&lines)[0].size_bytes, 48 * MIB);
    assert!(device.smi().unwrap().process_bytes(0, program.pid()).is_some());
}

#[test]
fn programs_end_with_their_input() {
    let device = device();
    let (hold, _) = ready(&device, "hold", &[]);
    let (lines, status) = hold.finish().unwrap();
    assert_eq!((lines.len(), status.code(), status.signal()), (0, Some(0), None));
}

#[test]
fn lingering_free_returns_after_its_address_was_given_away() {
    let device = device().set("SIM_FREE_LINGER_US", "300");
    let (_, lines) = ready(&device, "burst", &["100"]);
    let ns: f64 = truth::field(truth::line(&lines, "TIME").unwrap(), "ns_per_pair").unwrap();
    assert!(ns >= 300_000.0, "{ns}");
}

/// The variable that makes [`nvml_wrapper_sees_the_gpus`] ask instead of starting an asker: the
/// simulated NVML reads its environment, which a test with other threads must not change.
const ASKER: &str = "SIM_TEST_ASKS_NVML";

#[test]
fn nvml_wrapper_sees_the_gpus() {
    if let Ok(pid) = env::var(ASKER) {
        return ask_nvml(pid.parse().unwrap());
    }
    let device = device();
    let (hold, _) = ready(&device, "hold", &["33554432", "2", "1"]);
    for (hidden, slow_ms) in [("0", "0"), ("1", "1")] {
        let asker = Command::new(env::current_exe().unwrap())
            .args(["--exact", "sim::tests::nvml_wrapper_sees_the_gpus", "--nocapture"])
            .envs(device.env())
            .env(ASKER, hold.pid().to_string())
            .env("SIM_NVML_NO_PROCESSES", hidden)
            .env("SIM_NVML_SLOW_MS", slow_ms)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&asker.stdout);
        assert!(asker.status.success(), "{said}{}", String::from_utf8_lossy(&asker.stderr));
        assert!(said.contains("1 passed"), "{said}");
    }
}

fn ask_nvml(pid: u32) {
    use nvml_wrapper::{
        Nvml, enum_wrappers::device::TemperatureSensor, enums::device::UsedGpuMemory,
        error::NvmlError,
    };
    let library = sim().lib_dir.join("libnvidia-ml.so.1");
    let nvml = Nvml::builder().lib_path(library.as_os_str()).init().unwrap();
    assert_eq!(nvml.sys_driver_version().unwrap(), "580.159.04");
    assert_eq!(nvml.sys_cuda_driver_version().unwrap(), 12090);
    assert_eq!(nvml.device_count().unwrap(), 2);
    let gpu = nvml.device_by_index(1).unwrap();
    assert_eq!(nvml.device_by_uuid(gpu.uuid().unwrap()).unwrap().index().unwrap(), 1);
    assert_eq!(gpu.name().unwrap(), "vramscope simulated GPU");
    assert_eq!(gpu.pci_info().unwrap().bus_id, "00000000:2B:00.0");
    let memory = gpu.memory_info().unwrap();
    assert_eq!(memory.used, CONTEXT + 64 * MIB);
    assert_eq!(memory.total, memory.used + memory.free + memory.reserved);
    let processes = gpu.running_compute_processes().unwrap();
    let used = match env::var("SIM_NVML_NO_PROCESSES").as_deref() {
        Ok("1") => UsedGpuMemory::Unavailable,
        _ => UsedGpuMemory::Used(CONTEXT + 64 * MIB),
    };
    assert_eq!(processes.len(), 1);
    assert_eq!((processes[0].pid, &processes[0].used_gpu_memory), (pid, &used));
    assert_eq!(gpu.running_graphics_processes().unwrap(), []);
    assert_eq!(gpu.utilization_rates().unwrap().gpu, 87);
    assert_eq!(gpu.temperature(TemperatureSensor::Gpu).unwrap(), 63);
    assert_eq!(gpu.power_usage().unwrap(), 412_000);
    assert!(matches!(gpu.mig_mode(), Err(NvmlError::NotSupported)));
    assert_eq!(nvml.device_by_index(0).unwrap().memory_info().unwrap().used, 0);
    assert!(nvml.device_by_index(2).is_err());
}
