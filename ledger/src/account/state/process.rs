//! State of one process.

use std::{
    borrow::Cow,
    collections::{HashMap, hash_map::Entry},
};

use super::{
    growth::{Growth, growth},
    held::Held,
    pools::{PoolFloor, PoolUse},
    series::Series,
    usage::Usage,
};
use crate::{
    call::Level,
    rows::{EventRow, LiveRow},
};

/// A device as a process uses it. What is not known yet is filled in when a row tells it.
#[derive(Clone, Debug, Default)]
pub struct Device {
    /// NVML's number.
    pub nvml_index: Option<i32>,
    /// UUID.
    pub gpu_uuid: Option<String>,
    /// The process's number for it.
    pub cuda_ordinal: Option<i32>,
    /// Live device-level bytes over time.
    pub series: Series,
    usage: [Usage; Level::ALL.len()],
    pools: PoolFloor,
}

impl Device {
    /// Totals of one level.
    pub fn usage(&self, level: Level) -> &Usage {
        &self.usage[level as usize]
    }

    /// Stream-ordered pools.
    pub fn pools(&self) -> PoolUse {
        self.pools.usage()
    }

    /// Growth of the live device-level bytes.
    pub fn growth(&self) -> Option<Growth> {
        growth(&self.series)
    }

    fn is(&self, ordinal: Option<i32>, uuid: Option<&str>) -> bool {
        let agree = match (self.gpu_uuid.as_deref(), uuid) {
            (Some(mine), Some(uuid)) => mine == uuid,
            _ => true,
        };
        match (self.cuda_ordinal, ordinal) {
            (Some(mine), Some(ordinal)) => mine == ordinal && agree,
            (None, None) => self.gpu_uuid.as_deref() == uuid,
            _ => false,
        }
    }
}

/// One live allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveAllocation {
    /// Its level.
    pub level: Level,
    /// Index into [`Process::devices`].
    pub device: usize,
    /// Address or handle.
    pub addr: i64,
    /// Bytes, where known.
    pub size_bytes: Option<i64>,
    /// Function that allocated, for [`Process::api`].
    pub api: usize,
    /// Stack of the allocation; 0 = none taken.
    pub stack_id: i64,
    /// When it was allocated, nanoseconds since the epoch.
    pub ts_ns: i64,
    /// The program exported it: other processes may keep its pages alive.
    pub exported: bool,
}

/// Allocations of one size by one function: what a report without stacks can tell apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Function that allocated.
    pub api: Cow<'static, str>,
    /// Level.
    pub level: Level,
    /// Index into [`Process::devices`].
    pub device: usize,
    /// Bytes of each, where known.
    pub size_bytes: Option<i64>,
    /// How many.
    pub count: u64,
    /// Bytes of all.
    pub bytes: i64,
    /// When the first of them was allocated, nanoseconds since the epoch.
    pub first_ns: i64,
    /// When the last of them was.
    pub last_ns: i64,
}

/// What a process did through one function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApiUsage {
    /// The function.
    pub api: Cow<'static, str>,
    /// It gives a handle, which is no address.
    gives_handle: bool,
    /// Rows with its name.
    pub rows: u64,
    /// Of these, failed calls.
    pub failed: u64,
    /// Bytes that became alive through it.
    pub allocated_bytes: i64,
    /// Bytes that it freed.
    pub freed_bytes: i64,
}

/// Functions that give a handle, which is no address.
fn gives_handle(api: &str) -> bool {
    let exactly = [
        "cuMemCreate",
        "cuMemImportFromShareableHandle",
        "cuMulticastCreate",
        "cuImportExternalMemory",
        "cuExternalMemoryGetMappedMipmappedArray",
    ];
    exactly.contains(&api) || api.starts_with("cuArray") || api.starts_with("cuMipmapped")
}

/// Function, level, device, size.
type GroupKey = (usize, Level, usize, Option<i64>);

/// State of one process.
#[derive(Debug, Default)]
pub struct Process {
    pid: i32,
    first_ns: Option<i64>,
    last_ns: i64,
    devices: Vec<Device>,
    live: HashMap<i64, LiveAllocation>,
    pub(super) held: Held,
    by_addr: HashMap<(u8, i64), i64>,
    /// A handful: searching them is cheaper than hashing a name for each row.
    apis: Vec<ApiUsage>,
    never_freed: HashMap<GroupKey, Group>,
}

impl Process {
    /// Process id on the host.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Times of its first and last row, nanoseconds since the epoch.
    pub fn span_ns(&self) -> Option<(i64, i64)> {
        self.first_ns.map(|first_ns| (first_ns, self.last_ns))
    }

    /// Devices, in the order in which they were met. One of them may be the unknown one.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Live allocations by `alloc_id`, in no particular order.
    pub fn live(&self) -> impl Iterator<Item = (i64, &LiveAllocation)> {
        self.live.iter().map(|(&alloc_id, live)| (alloc_id, live))
    }

    /// One live allocation.
    pub fn allocation(&self, alloc_id: i64) -> Option<&LiveAllocation> {
        self.live.get(&alloc_id)
    }

    /// What was done through which function.
    pub fn apis(&self) -> &[ApiUsage] {
        &self.apis
    }

    /// Name of the function that made an allocation of this process.
    pub fn api(&self, live: &LiveAllocation) -> &str {
        self.apis.get(live.api).map_or("", |usage| usage.api.as_ref())
    }

    /// Live bytes of a level on all devices.
    pub fn live_bytes(&self, level: Level) -> i64 {
        self.devices.iter().map(|device| device.usage(level).live_bytes).sum()
    }

    /// Live allocations by function, level, device and size; most bytes first.
    pub fn live_groups(&self) -> Vec<Group> {
        self.grouped(HashMap::new())
    }

    /// [`Process::live_groups`], and what only the end of the process or of a context freed: what
    /// the program itself did not free; most bytes first.
    pub fn unfreed_groups(&self) -> Vec<Group> {
        self.grouped(self.never_freed.clone())
    }

    pub(super) fn apply(&mut self, row: &EventRow, level: Level) {
        self.pid = row.pid;
        self.first_ns.get_or_insert(row.ts_ns);
        self.last_ns = self.last_ns.max(row.ts_ns);
        let api = self.count_api(row);
        let device = self.device(row.cuda_ordinal, row.nvml_index, row.gpu_uuid.as_deref());
        if level == Level::Pool && row.op != "fail" {
            self.devices[device].pools.note(row);
        }
        match row.op.as_ref() {
            // An imported pool is no allocation.
            "alloc" | "reserve" | "import" if row.alloc_id != 0 => {
                self.open(row, level, device, api);
            }
            "map" => {
                self.held.mapped(row);
                if row.delta_bytes > 0 {
                    self.size_known(row);
                }
            }
            "unmap" => self.held.unmapped(row),
            "capture" | "captured" => self.held.captures(row.addr, row.op == "capture"),
            "free" => self.free(row, level, device),
            "fail" => {
                let usage = &mut self.devices[device].usage[level as usize];
                usage.fail(row.ts_ns, row.result, row.size_bytes);
                if row.api.starts_with("cuStreamEndCapture") {
                    self.held.captures(row.addr, false);
                }
            }
            "export" => {
                if let Some(live) = self.live.get_mut(&row.alloc_id) {
                    live.exported = true;
                }
            }
            _ => {}
        }
    }

    pub(super) fn start_from(&mut self, row: &LiveRow, level: Level) {
        let device = self.device(row.cuda_ordinal, row.nvml_index, row.gpu_uuid.as_deref());
        let known = self.apis.iter().position(|usage| usage.api == row.api);
        let api = known.unwrap_or_else(|| self.new_api(Cow::Owned(row.api.clone())));
        let live = LiveAllocation {
            level,
            device,
            addr: row.addr,
            size_bytes: row.size_bytes,
            api,
            stack_id: row.stack_id,
            ts_ns: row.alloc_ts_ns,
            exported: false,
        };
        if level == Level::Pool {
            self.devices[device].pools.start_from(row.size_bytes.unwrap_or(0));
        }
        self.first_ns.get_or_insert(row.ts_ns);
        self.last_ns = self.last_ns.max(row.ts_ns);
        self.hold(row.alloc_id, live, row.ts_ns);
    }

    /// Counts the row for its function and gives that one's index.
    fn count_api(&mut self, row: &EventRow) -> usize {
        let known = self.apis.iter().position(|usage| usage.api == row.api);
        let index = known.unwrap_or_else(|| self.new_api(row.api.clone()));
        let usage = &mut self.apis[index];
        usage.rows += 1;
        usage.failed += u64::from(row.op == "fail");
        let (up, down) = (row.delta_bytes.max(0), row.delta_bytes.min(0));
        usage.allocated_bytes = usage.allocated_bytes.saturating_add(up);
        usage.freed_bytes = usage.freed_bytes.saturating_sub(down);
        index
    }

    fn new_api(&mut self, api: Cow<'static, str>) -> usize {
        let gives_handle = gives_handle(&api);
        self.apis.push(ApiUsage { api, gives_handle, ..ApiUsage::default() });
        self.apis.len() - 1
    }

    /// The device of a row. An ordinal keeps its device when the UUID becomes known; another UUID
    /// under the same ordinal (after an exec) is another device.
    fn device(&mut self, ordinal: Option<i32>, nvml: Option<i32>, uuid: Option<&str>) -> usize {
        let found = self.devices.iter().position(|device| device.is(ordinal, uuid));
        let index = found.unwrap_or_else(|| {
            self.devices.push(Device { cuda_ordinal: ordinal, ..Device::default() });
            self.devices.len() - 1
        });
        let device = &mut self.devices[index];
        if device.gpu_uuid.is_none() && uuid.is_some() {
            device.gpu_uuid = uuid.map(str::to_owned);
        }
        device.nvml_index = nvml.or(device.nvml_index);
        index
    }

    fn open(&mut self, row: &EventRow, level: Level, device: usize, api: usize) {
        let usage = &mut self.devices[device].usage[level as usize];
        usage.allocs += 1;
        usage.allocated_bytes = usage.allocated_bytes.saturating_add(row.delta_bytes);
        let live = LiveAllocation {
            level,
            device,
            addr: row.addr,
            size_bytes: row.size_bytes,
            api,
            stack_id: row.stack_id,
            ts_ns: row.ts_ns,
            exported: false,
        };
        self.hold(row.alloc_id, live, row.ts_ns);
    }

    /// Makes an allocation live, unless it is the older of two at one address.
    fn hold(&mut self, alloc_id: i64, live: LiveAllocation, ts_ns: i64) {
        if let Some(place) = self.place_of(&live)
            && let Some(other) = self.by_addr.insert(place, alloc_id)
            && other != alloc_id
        {
            if self.live.get(&other).is_some_and(|other| other.ts_ns > live.ts_ns) {
                self.by_addr.insert(place, other);
                return;
            }
            self.drop_live(other, ts_ns);
        }
        let (level, device, size) = (live.level, live.device, live.size_bytes.unwrap_or(0));
        let Entry::Vacant(vacant) = self.live.entry(alloc_id) else { return };
        vacant.insert(live);
        self.held.opened(alloc_id, level);
        let usage = &mut self.devices[device].usage[level as usize];
        usage.live_count += 1;
        usage.raise(ts_ns, size);
        self.record(level, device, ts_ns);
    }

    /// The first map of imported memory tells its size.
    fn size_known(&mut self, row: &EventRow) {
        let Some(live) = self.live.get_mut(&row.alloc_id) else { return };
        let added = row.delta_bytes.saturating_sub(live.size_bytes.unwrap_or(0));
        live.size_bytes = Some(row.delta_bytes);
        let (level, device) = (live.level, live.device);
        let usage = &mut self.devices[device].usage[level as usize];
        usage.allocated_bytes = usage.allocated_bytes.saturating_add(row.delta_bytes);
        usage.raise(row.ts_ns, added);
        self.record(level, device, row.ts_ns);
    }

    fn free(&mut self, row: &EventRow, level: Level, device: usize) {
        let live = match self.live.entry(row.alloc_id) {
            // A release that left references or maps behind says `virtual`: nothing was freed.
            Entry::Occupied(entry) if entry.get().level != level => return,
            Entry::Occupied(entry) => Some(entry.remove()),
            Entry::Vacant(_) => None,
        };
        let device = live.as_ref().map_or(device, |live| live.device);
        let usage = &mut self.devices[device].usage[level as usize];
        if row.alloc_id == 0 {
            usage.unknown_frees += 1;
            return;
        }
        usage.frees += 1;
        usage.freed_bytes = usage.freed_bytes.saturating_sub(row.delta_bytes);
        let Some(live) = live else { return };
        self.dropped(row.alloc_id, &live, row.ts_ns);
        if row.implicit && row.api != "reused" {
            add_to(&mut self.never_freed, &live, &self.apis);
        }
    }

    fn drop_live(&mut self, alloc_id: i64, ts_ns: i64) {
        if let Some(live) = self.live.remove(&alloc_id) {
            self.dropped(alloc_id, &live, ts_ns);
        }
    }

    /// Takes out of the totals what is out of the live map.
    fn dropped(&mut self, alloc_id: i64, live: &LiveAllocation, ts_ns: i64) {
        self.held.closed(alloc_id);
        if let Some(place) = self.place_of(live)
            && let Entry::Occupied(entry) = self.by_addr.entry(place)
            && *entry.get() == alloc_id
        {
            entry.remove();
        }
        let usage = &mut self.devices[live.device].usage[live.level as usize];
        usage.drop_one(live.size_bytes.unwrap_or(0));
        self.record(live.level, live.device, ts_ns);
    }

    /// Where an address is taken. Virtual, host and tensor blocks share numbers with device blocks
    /// without being one another.
    fn place_of(&self, live: &LiveAllocation) -> Option<(u8, i64)> {
        let space = match live.level {
            Level::Device | Level::Pool | Level::Managed | Level::Imported => 0,
            Level::Host => 1,
            Level::Virtual => 2,
            Level::Tensor => 3,
        };
        (!self.is_handle(live)).then_some((space, live.addr))
    }

    /// Its `addr` is a handle, which is no address.
    pub(super) fn is_handle(&self, live: &LiveAllocation) -> bool {
        self.apis.get(live.api).is_some_and(|usage| usage.gives_handle)
    }

    fn record(&mut self, level: Level, device: usize, ts_ns: i64) {
        if level == Level::Device {
            let device = &mut self.devices[device];
            device.series.push(ts_ns, device.usage[level as usize].live_bytes);
        }
    }

    /// What is live, added to `groups`, most bytes first.
    fn grouped(&self, mut groups: HashMap<GroupKey, Group>) -> Vec<Group> {
        for live in self.live.values() {
            add_to(&mut groups, live, &self.apis);
        }
        let mut groups: Vec<Group> = groups.into_values().collect();
        groups.sort_by(|a, b| {
            let by_bytes = b.bytes.cmp(&a.bytes).then(b.count.cmp(&a.count));
            let key = |group: &Group| (group.level, group.device, group.size_bytes);
            by_bytes.then_with(|| a.api.cmp(&b.api)).then_with(|| key(a).cmp(&key(b)))
        });
        groups
    }
}

fn add_to(groups: &mut HashMap<GroupKey, Group>, live: &LiveAllocation, apis: &[ApiUsage]) {
    let key = (live.api, live.level, live.device, live.size_bytes);
    let group = groups.entry(key).or_insert_with(|| Group {
        api: apis.get(live.api).map(|usage| usage.api.clone()).unwrap_or_default(),
        level: live.level,
        device: live.device,
        size_bytes: live.size_bytes,
        count: 0,
        bytes: 0,
        first_ns: live.ts_ns,
        last_ns: live.ts_ns,
    });
    group.count += 1;
    group.bytes = group.bytes.saturating_add(live.size_bytes.unwrap_or(0));
    group.first_ns = group.first_ns.min(live.ts_ns);
    group.last_ns = group.last_ns.max(live.ts_ns);
}
