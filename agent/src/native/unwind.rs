//! Walks a copied stack from the traced function to the bottom.

use std::{
    collections::{BTreeMap, HashMap},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Weak},
};

use agent_common::stack::RawReturn;
use framehop::{
    CacheNative, ExplicitModuleSectionInfo, FrameAddress, MayAllocateDuringUnwind,
    UnwindRegsNative, Unwinder as _, UnwinderNative,
};

use super::{
    AddressSpace, Module, Place,
    cfi::Function,
    expression::{self, Caller, Followed},
};

/// Most frames of a stack.
pub const FRAME_LIMIT: usize = 512;
/// Functions of one file whose records are kept. Jobs have hundreds; a file that fills it up
/// starts again.
const FUNCTION_LIMIT: usize = 8192;
/// Files whose records are kept before those that nobody maps any longer are dropped.
const TABLE_LIMIT: usize = 256;
/// Farther above the copy than any thread's stack is large, an address is no part of the stack.
const STACK_LIMIT: u64 = 1 << 30;

type Rules = UnwinderNative<Box<[u8]>, MayAllocateDuringUnwind>;

/// The registers at the entry of the traced function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Registers {
    /// Instruction pointer: the first instruction of the function.
    pub ip: u64,
    /// Stack pointer: address of the first byte of the copy.
    pub sp: u64,
    /// Frame pointer.
    pub fp: u64,
    /// Link register (aarch64; 0 elsewhere).
    pub lr: u64,
}

/// One frame of a native stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NativeFrame {
    /// An address inside the call (the return address less one), or the traced function's first:
    /// what function and line are looked up by.
    pub pc: u64,
    /// Stack pointer of the frame: what lies on the stack from here up to `cfa` belongs to it.
    pub sp: u64,
    /// Stack pointer of its caller; that of the frame where it is not known, as for the last one.
    pub cfa: u64,
    /// It was found by following the frame pointer out of code without unwind information:
    /// likely, not certain.
    pub by_frame_pointer: bool,
}

/// Why a walk ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// At the bottom of the stack: all frames are there.
    Root,
    /// The stack goes on above the copy.
    CopyTooShort,
    /// The last frame's code has no unwind information (just-in-time compiled, or hand-written).
    NoUnwindInfo {
        /// Where.
        pc: u64,
    },
    /// A return address points to where nothing is mapped executable: the address space is out of
    /// date, or the stack is corrupt.
    Unmapped {
        /// Where.
        pc: u64,
    },
    /// After [`FRAME_LIMIT`] frames.
    Limit,
    /// The stack makes no sense.
    Corrupt,
}

/// Walks stacks; keeps what it has read of the files' unwind information.
#[derive(Default)]
pub struct Unwinder {
    /// By the modules' ids.
    tables: HashMap<u64, Table>,
}

impl std::fmt::Debug for Unwinder {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Unwinder").field("tables", &self.tables.len()).finish()
    }
}

impl Unwinder {
    /// Walks the stack whose first bytes are `copy`, innermost frame first.
    ///
    /// `returns` are the return addresses that pending return probes have replaced. `out` is
    /// cleared; its frames are valid however the walk ended.
    pub fn unwind(
        &mut self,
        space: &AddressSpace,
        regs: Registers,
        copy: &[u8],
        returns: &[RawReturn],
        out: &mut Vec<NativeFrame>,
    ) -> End {
        // framehop adds to addresses that it found on the stack without checking for overflow,
        // and the files' tables are whatever somebody wrote: a panic in there costs this stack,
        // not the agent. The tables are rebuilt, since they may be half changed.
        let walk = || self.walk_copy(space, regs, copy, returns, out);
        catch_unwind(AssertUnwindSafe(walk)).unwrap_or_else(|_| {
            self.tables.clear();
            End::Corrupt
        })
    }

    /// [`Self::unwind`], panics included.
    pub(super) fn walk_copy(
        &mut self,
        space: &AddressSpace,
        regs: Registers,
        copy: &[u8],
        returns: &[RawReturn],
        out: &mut Vec<NativeFrame>,
    ) -> End {
        out.clear();
        self.walk(space, regs, &Stack { sp: regs.sp, copy, returns }, out)
    }

    fn walk(
        &mut self,
        space: &AddressSpace,
        entry: Registers,
        stack: &Stack<'_>,
        out: &mut Vec<NativeFrame>,
    ) -> End {
        if space.lookup(entry.ip).is_none() {
            return End::Unmapped { pc: entry.ip };
        }
        let first = NativeFrame { pc: entry.ip, sp: entry.sp, cfa: entry.sp, ..Default::default() };
        out.push(first);
        let Some((mut ret, mut regs)) = caller_of_entry(entry, stack) else {
            return End::CopyTooShort;
        };
        let mut by_frame_pointer = false;
        loop {
            let sp = regs.sp();
            if let Some(callee) = out.last_mut() {
                callee.cfa = sp;
            }
            ret = unsigned(stack.repaired(ret, sp));
            let Some(address) = FrameAddress::from_return_address(ret) else { return End::Root };
            let pc = address.address_for_lookup();
            let Some(place) = space.lookup(pc) else { return End::Unmapped { pc } };
            if out.len() >= FRAME_LIMIT {
                return End::Limit;
            }
            out.push(NativeFrame { pc, sp, cfa: sp, by_frame_pointer });
            let step = match self.table(&place) {
                Some((table, svma)) => table.step(Address { pc, svma }, &mut regs, stack),
                None => Step::NoInfo,
            };
            ret = match step {
                Step::Caller(ret) if regs.sp() > sp => ret,
                Step::Caller(_) => return End::Corrupt,
                Step::End(end) => return end,
                Step::NoInfo => match by_chain(space, &mut regs, stack) {
                    Some(ret) => ret,
                    None => return End::NoUnwindInfo { pc },
                },
            };
            by_frame_pointer = matches!(step, Step::NoInfo);
        }
    }

    /// What is known of the file at a place, after reading the record of the function there; `None`
    /// where it has none.
    fn table(&mut self, place: &Place<'_>) -> Option<(&mut Table, u64)> {
        let Place::Module { module, svma: Some(svma), .. } = place else { return None };
        if self.tables.len() >= TABLE_LIMIT && !self.tables.contains_key(&module.id) {
            self.tables.retain(|_, table| table.module.strong_count() > 0);
        }
        let table = self.tables.entry(module.id).or_insert_with(|| Table::new(module));
        table.prepare(module, *svma).then_some((table, *svma))
    }
}

/// The copied part of a stack.
struct Stack<'a> {
    /// Address of the first byte.
    sp: u64,
    copy: &'a [u8],
    returns: &'a [RawReturn],
}

impl Stack<'_> {
    /// The word at an address, as it was before return probes replaced it.
    fn read(&self, addr: u64) -> Option<u64> {
        if let Some(hijacked) = self.returns.iter().find(|hijacked| hijacked.slot == addr)
            && cfg!(target_arch = "x86_64")
        {
            return Some(hijacked.address);
        }
        let at = usize::try_from(addr.checked_sub(self.sp)?).ok()?;
        let word = self.copy.get(at..at.checked_add(8)?)?;
        Some(u64::from_le_bytes(word.try_into().ok()?))
    }

    /// Why a read failed.
    fn end_at(&self, addr: u64) -> End {
        let end = self.sp.saturating_add(self.copy.len() as u64);
        let above = addr.saturating_add(8) > end && addr < end.saturating_add(STACK_LIMIT);
        if addr >= self.sp && above { End::CopyTooShort } else { End::Corrupt }
    }

    /// The return address of a function whose caller's stack pointer is `sp`.
    ///
    /// On aarch64 a return probe replaces the link register, and the slot is the stack pointer at
    /// the entry of the function, which is its caller's; where the function then stores the
    /// register is its own affair. On x86-64 the slot on the stack was replaced ([`Self::read`]).
    fn repaired(&self, ret: u64, sp: u64) -> u64 {
        let hijacked = self.returns.iter().find(|hijacked| hijacked.slot == sp);
        match hijacked {
            Some(hijacked) if cfg!(target_arch = "aarch64") => hijacked.address,
            _ => ret,
        }
    }
}

/// Return address and registers of the caller of a function that has just been entered: that takes
/// no unwind information.
#[cfg(target_arch = "x86_64")]
fn caller_of_entry(entry: Registers, stack: &Stack<'_>) -> Option<(u64, UnwindRegsNative)> {
    let ret = stack.read(entry.sp)?;
    Some((ret, UnwindRegsNative::new(ret, entry.sp.checked_add(8)?, entry.fp)))
}

/// Return address and registers of the caller of a function that has just been entered: that takes
/// no unwind information.
#[cfg(target_arch = "aarch64")]
#[expect(clippy::unnecessary_wraps, reason = "the other architecture reads the stack for it")]
fn caller_of_entry(entry: Registers, _stack: &Stack<'_>) -> Option<(u64, UnwindRegsNative)> {
    Some((entry.lr, UnwindRegsNative::new(entry.lr, entry.sp, entry.fp)))
}

/// A return address without its signature: aarch64 keeps one in the bits above an address.
fn unsigned(ret: u64) -> u64 {
    if cfg!(target_arch = "aarch64") { ret & (u64::MAX >> 16) } else { ret }
}

#[cfg(target_arch = "x86_64")]
fn frame_pointer(regs: &UnwindRegsNative) -> u64 {
    regs.bp()
}

#[cfg(target_arch = "x86_64")]
fn set_frame(regs: &mut UnwindRegsNative, sp: u64, fp: u64) {
    regs.set_sp(sp);
    regs.set_bp(fp);
}

#[cfg(target_arch = "aarch64")]
fn frame_pointer(regs: &UnwindRegsNative) -> u64 {
    regs.fp()
}

#[cfg(target_arch = "aarch64")]
fn set_frame(regs: &mut UnwindRegsNative, sp: u64, fp: u64) {
    regs.set_sp(sp);
    regs.set_fp(fp);
}

/// The caller by the chain of frame pointers, which both architectures lay out alike, where the
/// frame pointer is one: inside the copy, below it a return address to a file's code.
fn by_chain(space: &AddressSpace, regs: &mut UnwindRegsNative, stack: &Stack<'_>) -> Option<u64> {
    let fp = frame_pointer(regs);
    if fp < regs.sp() || !fp.is_multiple_of(8) {
        return None;
    }
    let (next, ret) = (stack.read(fp)?, stack.read(fp.checked_add(8)?)?);
    let place = space.lookup(ret.checked_sub(1)?)?;
    if !matches!(place, Place::Module { svma: Some(_), .. }) {
        return None;
    }
    set_frame(regs, fp.checked_add(16)?, next);
    Some(ret)
}

/// Where a frame is: in the process, and as the file states it.
#[derive(Clone, Copy)]
struct Address {
    pc: u64,
    svma: u64,
}

enum Step {
    /// The return address into the caller.
    Caller(u64),
    NoInfo,
    End(End),
}

/// A function whose record was read.
struct Known {
    /// The address after its last.
    end: u64,
    /// Its record, where [`expression`] steps through it instead of framehop.
    own: Option<Box<Function>>,
}

/// What has been read of one file's unwind information.
///
/// Addresses are those that the file states, so that all processes share it.
struct Table {
    module: Weak<Module>,
    /// Functions whose records were read, by first address.
    functions: BTreeMap<u64, Known>,
    /// The records of most of them.
    rules: Rules,
    cache: CacheNative<MayAllocateDuringUnwind>,
}

impl Table {
    fn new(module: &Arc<Module>) -> Self {
        let (rules, cache) = (Rules::new(), CacheNative::new());
        Self { module: Arc::downgrade(module), functions: BTreeMap::new(), rules, cache }
    }

    /// Reads the record of the function at an address, unless it is there; whether there is one.
    fn prepare(&mut self, module: &Arc<Module>, svma: u64) -> bool {
        if self.known(svma).is_some() {
            return true;
        }
        let Some(function) = Function::find(module, svma) else { return false };
        // Ranges that overlap would hide one another.
        let overlaps = self.functions.range(..function.range.end).next_back();
        if self.functions.len() >= FUNCTION_LIMIT
            || overlaps.is_some_and(|(_, known)| known.end > function.range.start)
        {
            *self = Self::new(module);
        }
        self.add(function);
        true
    }

    fn known(&self, svma: u64) -> Option<&Known> {
        let (_, known) = self.functions.range(..=svma).next_back()?;
        (svma < known.end).then_some(known)
    }

    fn add(&mut self, function: Function) {
        let (start, end) = (function.range.start, function.range.end);
        if expression::is_needed(&function) {
            self.functions.insert(start, Known { end, own: Some(Box::new(function)) });
            return;
        }
        self.functions.insert(start, Known { end, own: None });
        let section_end = function.section_svma.saturating_add(function.section.len() as u64);
        let sections = ExplicitModuleSectionInfo {
            base_svma: start,
            eh_frame_svma: Some(function.section_svma..section_end),
            eh_frame: Some(function.section.into_boxed_slice()),
            ..Default::default()
        };
        self.rules.add_module(framehop::Module::new(String::new(), start..end, start, sections));
    }

    /// From a frame's registers to its caller's.
    fn step(&mut self, at: Address, regs: &mut UnwindRegsNative, stack: &Stack<'_>) -> Step {
        let mut failed = None;
        let mut read = |addr| {
            let word = stack.read(addr);
            failed = failed.or(word.is_none().then_some(addr));
            word
        };
        if let Some(Known { own: Some(function), .. }) = self.known(at.svma) {
            let followed = Followed { ip: at.pc, sp: regs.sp(), fp: frame_pointer(regs) };
            let caller = expression::step(function, at.svma, followed, &mut read);
            return match (caller, failed) {
                (_, Some(addr)) => Step::End(stack.end_at(addr)),
                (Some(Caller::Found(caller)), None) => {
                    set_frame(regs, caller.sp, caller.fp);
                    Step::Caller(caller.ip)
                }
                (Some(Caller::None), None) => Step::End(End::Root),
                (None, None) => Step::NoInfo,
            };
        }
        let Some(address) = FrameAddress::from_return_address(at.svma.wrapping_add(1)) else {
            return Step::NoInfo;
        };
        let mut read = |addr| read(addr).ok_or(());
        let result = self.rules.unwind_frame(address, regs, &mut self.cache, &mut read);
        match (result, failed) {
            (Ok(Some(ret)), None) => Step::Caller(ret),
            (Ok(None), None) => Step::End(End::Root),
            (_, failed) => {
                // framehop takes an unreadable stack for a fault of the record and remembers for
                // this address to follow the frame pointer instead: the next stack would be
                // walked by that.
                self.cache = CacheNative::new();
                Step::End(failed.map_or(End::Corrupt, |addr| stack.end_at(addr)))
            }
        }
    }
}
