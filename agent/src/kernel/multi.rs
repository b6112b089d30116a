//! Many probes in one link (`uprobe.multi`).
//!
//! A probe that is a perf event of its own costs the kernel a grace period when it goes, one after
//! the other: 78 of them took 8.5 s on an idle machine, under a lock that every new probe needs.
//! A multi link attaches a whole library at once and waits once. The aya that our compiler can
//! build has no such links, so the programs are loaded and linked here by the system call;
//! they share the maps of the object that aya loaded.
//!
//! `include/uapi/linux/bpf.h`: `union bpf_attr`, commands `BPF_PROG_LOAD` and `BPF_LINK_CREATE`.

use std::{
    collections::HashSet,
    ffi::CString,
    io,
    os::{
        fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd, RawFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use aya::{
    Ebpf,
    maps::{Map, MapData},
};
use aya_obj::{Function, Object, btf::BtfFeatures};
use thiserror::Error;

const BPF_PROG_LOAD: i64 = 5;
const BPF_BTF_LOAD: i64 = 18;
const BPF_LINK_CREATE: i64 = 28;
const BPF_PROG_TYPE_KPROBE: u32 = 2;
const BPF_TRACE_UPROBE_MULTI: u32 = 48;
const BPF_F_UPROBE_MULTI_RETURN: u32 = 1;

/// Why multi links are not used.
#[derive(Debug, Error)]
pub(super) enum MultiError {
    /// The kernel is older than 6.6, or has their fault.
    #[error("this kernel has no multi links, or such as let one thread of a process through")]
    Unsupported,
    /// The object is not what it should be.
    #[error("prepare {0} for a multi link")]
    Object(&'static str),
    /// The kernel refused.
    #[error("{what}")]
    Refused {
        /// What was asked.
        what: &'static str,
        /// Why not.
        source: io::Error,
    },
}

/// A program loaded for multi links.
#[derive(Debug)]
pub(super) struct MultiProgram {
    fd: OwnedFd,
    returns: bool,
}

/// The start of `bpf_attr` for `BPF_PROG_LOAD`.
#[repr(C)]
struct ProgLoad {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
    prog_ifindex: u32,
    expected_attach_type: u32,
    prog_btf_fd: u32,
    func_info_rec_size: u32,
    func_info: u64,
    func_info_cnt: u32,
    padding: u32,
}

impl ProgLoad {
    /// A program for multi links. The instructions must live until it is loaded.
    fn new<T>(instructions: &[T]) -> Self {
        Self {
            prog_type: BPF_PROG_TYPE_KPROBE,
            insn_cnt: instructions.len() as u32,
            insns: instructions.as_ptr() as u64,
            license: c"Dual MIT/GPL".as_ptr() as u64,
            log_level: 0,
            log_size: 0,
            log_buf: 0,
            kern_version: 0,
            prog_flags: 0,
            prog_name: [0; 16],
            prog_ifindex: 0,
            expected_attach_type: BPF_TRACE_UPROBE_MULTI,
            prog_btf_fd: 0,
            func_info_rec_size: 0,
            func_info: 0,
            func_info_cnt: 0,
            padding: 0,
        }
    }
}

/// The start of `bpf_attr` for `BPF_BTF_LOAD`.
#[repr(C)]
struct BtfLoad {
    btf: u64,
    log_buf: u64,
    btf_size: u32,
    log_size: u32,
    log_level: u32,
    padding: u32,
}

/// `bpf_attr` for `BPF_LINK_CREATE`, member `uprobe_multi`.
#[repr(C)]
struct LinkCreate {
    prog_fd: u32,
    target_fd: u32,
    attach_type: u32,
    flags: u32,
    path: u64,
    offsets: u64,
    ref_ctr_offsets: u64,
    cookies: u64,
    cnt: u32,
    multi_flags: u32,
    pid: u32,
    padding: u32,
}

/// Calls `bpf(2)`, which gives a descriptor.
fn bpf<T>(command: i64, attr: &mut T) -> io::Result<OwnedFd> {
    // SAFETY: the kernel reads `size_of::<T>()` bytes of `attr` and what it points to, all of which
    // the caller keeps alive until this returns.
    let fd =
        unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// The descriptor behind the kinds of map that the object has.
fn map_data(map: &Map) -> Option<&MapData> {
    match map {
        Map::Array(data)
        | Map::HashMap(data)
        | Map::LruHashMap(data)
        | Map::RingBuf(data)
        | Map::PerfEventArray(data)
        | Map::PerCpuArray(data) => Some(data),
        _ => None,
    }
}

/// `r0 = 0; exit`: the shortest program.
const NOTHING: [u64; 2] = [0xb7, 0x95];

/// Whether the kernel has multi links whose process filter works. They came with 6.6; until 6.10,
/// and the stable kernels of that time, the filter let only one thread of the process through
/// (kernel commit 46ba0e49b642).
///
/// Asked as libbpf does (`probe_uprobe_multi_link`): a link to a folder is a bad descriptor where
/// there are such links; a process -1 is invalid, before the look at the folder, where the filter
/// works.
pub fn supported() -> io::Result<bool> {
    let program = match bpf(BPF_PROG_LOAD, &mut ProgLoad::new(&NOTHING)) {
        Ok(fd) => MultiProgram { fd, returns: false },
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Ok(false),
        Err(error) => return Err(error),
    };
    let refusal = |pid: Option<u32>| {
        program.attach(Path::new("/"), &[0], &[0], pid).err().and_then(|error| error.raw_os_error())
    };
    Ok(refusal(None) == Some(libc::EBADF) && refusal(Some(u32::MAX)) == Some(libc::EINVAL))
}

/// Loads the programs named, as (name, whether it runs at return). `ebpf` must still have all its
/// maps.
pub(super) fn load<const N: usize>(
    ebpf: &Ebpf,
    bytes: &[u8],
    names: [(&'static str, bool); N],
) -> Result<[MultiProgram; N], MultiError> {
    if !supported().map_err(|source| MultiError::Refused { what: "ask for multi links", source })? {
        return Err(MultiError::Unsupported);
    }
    let mut object = Object::parse(bytes).or(Err(MultiError::Object("the eBPF object")))?;
    let text: HashSet<usize> = object.functions.keys().map(|(section, _)| *section).collect();
    let maps: Vec<_> = object.maps.drain().collect();
    let loaded = maps.iter().filter_map(|(name, map)| {
        let data = map_data(ebpf.map(name)?)?;
        Some((name.as_str(), data.fd().as_fd().as_raw_fd(), map))
    });
    let btf = load_btf(&mut object)?;
    object.relocate_maps(loaded, &text).or(Err(MultiError::Object("the maps")))?;
    object.relocate_calls(&text).or(Err(MultiError::Object("the calls")))?;
    let mut programs = Vec::with_capacity(N);
    for (name, returns) in names {
        let program = object.programs.get(name).ok_or(MultiError::Object(name))?;
        let function =
            object.functions.get(&program.function_key()).ok_or(MultiError::Object(name))?;
        programs.push(MultiProgram { fd: load_one(name, function, &btf)?, returns });
    }
    programs.try_into().or(Err(MultiError::Object("the programs")))
}

/// Loads the object's types, which tell the verifier which functions it may go through on their own.
fn load_btf(object: &mut Object) -> Result<OwnedFd, MultiError> {
    const ALL: bool = true; // all are older than multi links
    let features = BtfFeatures::new(ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL);
    let missing = || MultiError::Object("the types");
    let btf = object.fixup_and_sanitize_btf(&features).or(Err(missing()))?.ok_or_else(missing)?;
    let bytes = btf.to_bytes();
    let mut attr = BtfLoad {
        btf: bytes.as_ptr() as u64,
        log_buf: 0,
        btf_size: bytes.len() as u32,
        log_size: 0,
        log_level: 0,
        padding: 0,
    };
    bpf(BPF_BTF_LOAD, &mut attr)
        .map_err(|source| MultiError::Refused { what: "load the programs' types", source })
}

fn load_one(name: &'static str, function: &Function, btf: &OwnedFd) -> Result<OwnedFd, MultiError> {
    let func_info = function.func_info.func_info_bytes();
    let mut prog_name = [0; 16];
    for (to, from) in prog_name.iter_mut().zip(name.bytes().take(15)) {
        *to = from;
    }
    let mut attr = ProgLoad {
        prog_name,
        prog_btf_fd: btf.as_raw_fd() as u32,
        func_info_rec_size: function.func_info_rec_size as u32,
        func_info: func_info.as_ptr() as u64,
        func_info_cnt: function.func_info.num_info,
        ..ProgLoad::new(&function.instructions)
    };
    bpf(BPF_PROG_LOAD, &mut attr)
        .map_err(|source| MultiError::Refused { what: "load a program for multi links", source })
}

impl MultiProgram {
    /// Whether the kernel would let the calling thread attach: a folder has no functions, and it says
    /// that only to those who may.
    pub(super) fn may_attach(&self) -> bool {
        let refused = self.attach(Path::new("/"), &[0], &[0], None);
        refused.is_err_and(|error| error.raw_os_error() == Some(libc::EBADF))
    }

    /// Attaches at the file's offsets, each with its cookie; for one process or for all.
    pub(super) fn attach(
        &self,
        file: &Path,
        offsets: &[u64],
        cookies: &[u64],
        pid: Option<u32>,
    ) -> io::Result<OwnedFd> {
        debug_assert_eq!(offsets.len(), cookies.len());
        let path = CString::new(file.as_os_str().as_bytes())?;
        let mut attr = LinkCreate {
            prog_fd: self.fd.as_raw_fd() as u32,
            target_fd: 0,
            attach_type: BPF_TRACE_UPROBE_MULTI,
            flags: 0,
            path: path.as_ptr() as u64,
            offsets: offsets.as_ptr() as u64,
            ref_ctr_offsets: 0,
            cookies: cookies.as_ptr() as u64,
            cnt: offsets.len().min(cookies.len()) as u32,
            multi_flags: if self.returns { BPF_F_UPROBE_MULTI_RETURN } else { 0 },
            pid: pid.unwrap_or(0),
            padding: 0,
        };
        bpf(BPF_LINK_CREATE, &mut attr)
    }
}
