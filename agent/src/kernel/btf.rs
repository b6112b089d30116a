//! Offsets of structure members, read from the running kernel's BTF.
//!
//! Rust cannot emit relocations for them, so the agent looks the few that it needs up itself.
//! Format: <https://docs.kernel.org/bpf/btf.html>.

use std::{fs, path::Path};

use agent_common::offsets::Offsets;
use thiserror::Error;

/// Why offsets are not known.
#[derive(Debug, Error)]
pub enum BtfError {
    /// The file is not readable.
    #[error(
        "read the kernel's type information {path} (needs a kernel with CONFIG_DEBUG_INFO_BTF)"
    )]
    Read {
        /// Which file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// Not what the format says.
    #[error("the kernel's type information is malformed at byte {0}")]
    Malformed(usize),
    /// A member that this kernel does not have.
    #[error("this kernel's type information has no {0}")]
    Missing(String),
}

const MAGIC: u16 = 0xeb9f;
const KIND_STRUCT: u32 = 4;
const KIND_UNION: u32 = 5;

/// Where a structure's members lie in the file.
#[derive(Clone, Copy, Debug)]
struct Type {
    name: u32,
    kind: u32,
    /// Members carry a bit-field size in the upper byte of their offset.
    packed: bool,
    members: usize,
    count: usize,
}

/// Parsed type information.
#[derive(Debug)]
pub struct Btf {
    bytes: Vec<u8>,
    strings: usize,
    /// By type id; id 0 is void.
    types: Vec<Type>,
}

impl Btf {
    /// The running kernel's.
    pub fn of_kernel() -> Result<Self, BtfError> {
        Self::read(Path::new("/sys/kernel/btf/vmlinux"))
    }

    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, BtfError> {
        let bytes = fs::read(path)
            .map_err(|source| BtfError::Read { path: path.display().to_string(), source })?;
        Self::parse(bytes)
    }

    /// Parses the bytes.
    pub fn parse(bytes: Vec<u8>) -> Result<Self, BtfError> {
        let magic = u32_at(&bytes, 0)? as u16;
        if magic != MAGIC {
            return Err(BtfError::Malformed(0));
        }
        let header = u32_at(&bytes, 4)? as usize;
        let first = header + u32_at(&bytes, 8)? as usize;
        let end = first + u32_at(&bytes, 12)? as usize;
        let strings = header + u32_at(&bytes, 16)? as usize;
        let types = walk(&bytes, first, end)?;
        Ok(Self { bytes, strings, types })
    }

    /// Byte offset of `member` in `structure`, through anonymous members too.
    pub fn offset(&self, structure: &str, member: &str) -> Result<u32, BtfError> {
        self.types
            .iter()
            .filter(|ty| ty.kind == KIND_STRUCT && self.name(ty.name) == structure.as_bytes())
            .find_map(|ty| self.member(*ty, member, 0))
            .map(|bits| bits / 8)
            .ok_or_else(|| BtfError::Missing(format!("{structure}.{member}")))
    }

    /// Bit offset of a member. `depth` bounds hostile nesting.
    fn member(&self, ty: Type, member: &str, depth: u32) -> Option<u32> {
        if depth > 8 {
            return None;
        }
        (0..ty.count).find_map(|n| {
            let at = ty.members + n * 12;
            let name = self.name(u32_at(&self.bytes, at).ok()?);
            let mut bits = u32_at(&self.bytes, at + 8).ok()?;
            if ty.packed {
                bits &= 0x00ff_ffff;
            }
            if name == member.as_bytes() {
                return Some(bits);
            }
            if !name.is_empty() {
                return None;
            }
            let inner = self.types.get(u32_at(&self.bytes, at + 4).ok()? as usize)?;
            Some(bits + self.member(*inner, member, depth + 1)?)
        })
    }

    fn name(&self, offset: u32) -> &[u8] {
        let start = self.strings + offset as usize;
        let tail = self.bytes.get(start..).unwrap_or_default();
        tail.split(|byte| *byte == 0).next().unwrap_or_default()
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Result<u32, BtfError> {
    bytes
        .get(at..at + 4)
        .and_then(|four| four.try_into().ok())
        .map(u32::from_le_bytes)
        .ok_or(BtfError::Malformed(at))
}

fn walk(bytes: &[u8], first: usize, end: usize) -> Result<Vec<Type>, BtfError> {
    let mut types = vec![Type { name: 0, kind: 0, packed: false, members: 0, count: 0 }];
    let mut at = first;
    while at < end {
        let info = u32_at(bytes, at + 4)?;
        let (kind, count) = (info >> 24 & 0x1f, (info & 0xffff) as usize);
        let is_struct = kind == KIND_STRUCT || kind == KIND_UNION;
        types.push(Type {
            name: u32_at(bytes, at)?,
            kind,
            packed: info >> 31 == 1,
            members: at + 12,
            count: if is_struct { count } else { 0 },
        });
        at += 12 + trailing_bytes(kind, count).ok_or(BtfError::Malformed(at))?;
    }
    Ok(types)
}

/// Bytes after a type's three words, by kind.
fn trailing_bytes(kind: u32, count: usize) -> Option<usize> {
    Some(match kind {
        2 | 7..=12 | 16 | 18 => 0, // pointer, forward, typedef, qualifiers, func, float, type tag
        1 | 14 | 17 => 4,          // int, variable, declaration tag
        3 => 12,                   // array
        KIND_STRUCT | KIND_UNION | 15 | 19 => 12 * count, // members, sections, 64-bit enumerators
        6 | 13 => 8 * count,       // enumerators, parameters
        _ => return None,
    })
}

/// The offsets that the kernel half needs.
pub fn offsets(btf: &Btf) -> Result<Offsets, BtfError> {
    Ok(Offsets {
        task_tgid: btf.offset("task_struct", "tgid")?,
        task_group_leader: btf.offset("task_struct", "group_leader")?,
        // 5.5 renamed it from real_start_time.
        task_start_boottime: btf.offset("task_struct", "start_boottime")?,
        task_signal: btf.offset("task_struct", "signal")?,
        task_exit_code: btf.offset("task_struct", "exit_code")?,
        task_mm: btf.offset("task_struct", "mm")?,
        task_thread_pointer: thread_pointer(btf)?,
        task_utask: btf.offset("task_struct", "utask")?,
        utask_return_instances: btf.offset("uprobe_task", "return_instances")?,
        return_stack: btf.offset("return_instance", "stack")?,
        return_orig_ret_vaddr: btf.offset("return_instance", "orig_ret_vaddr")?,
        return_next: btf.offset("return_instance", "next")?,
        signal_live: btf.offset("signal_struct", "live")?,
        signal_group_exit_code: btf.offset("signal_struct", "group_exit_code")?,
        signal_flags: btf.offset("signal_struct", "flags")?,
    })
}

/// `fsbase` of x86-64, `tp_value` of aarch64 (which lies in a member `uw` of `thread_struct`).
fn thread_pointer(btf: &Btf) -> Result<u32, BtfError> {
    let thread = btf.offset("task_struct", "thread")?;
    let inner = if cfg!(target_arch = "x86_64") {
        btf.offset("thread_struct", "fsbase")?
    } else {
        // arch/arm64/include/asm/processor.h: the first member of the first member.
        btf.offset("thread_struct", "uw")?
    };
    Ok(thread + inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_bytes_are_an_error() {
        assert!(Btf::parse(Vec::new()).is_err());
        assert!(Btf::parse(vec![0; 64]).is_err());
        let mut truncated = vec![0x9f, 0xeb, 1, 0];
        truncated.extend([24u32, 0, 1000, 1000, 0].iter().flat_map(|word| word.to_le_bytes()));
        assert!(Btf::parse(truncated).is_err());
    }

    #[test]
    fn the_running_kernels_task_has_the_members() {
        let Ok(btf) = Btf::of_kernel() else {
            println!("skipped: this kernel has no readable BTF");
            return;
        };
        let found = offsets(&btf).unwrap();
        assert!(found.task_tgid > 0 && found.task_signal > 0 && found.signal_flags > 0);
        assert!(btf.offset("return_instance", "next").is_ok());
        assert!(btf.offset("task_struct", "no_such_member").is_err());
    }
}
