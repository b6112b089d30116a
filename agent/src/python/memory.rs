//! Reads the memory of a live process.

use std::{fs::File, os::unix::fs::FileExt as _};

use crate::host::Host;

/// The memory of a process, as it was when this was opened: after an exec or the process's end
/// every read fails, even where the process id has been given away anew.
#[derive(Debug)]
pub struct Memory(Option<File>);

impl Memory {
    /// Opens `/proc/PID/mem` for reading. Takes what attaching a debugger takes; without it, and
    /// for a process that has ended, every read fails.
    pub fn open(host: &Host, tgid: u32) -> Self {
        Self(File::open(host.process_path(tgid, "mem")).ok())
    }

    /// Fills the buffer from an address of the process. `false`: not all of it could be read.
    pub fn read(&self, addr: u64, into: &mut [u8]) -> bool {
        self.0.as_ref().is_some_and(|file| file.read_exact_at(into, addr).is_ok())
    }

    /// Reads a 64-bit word.
    pub fn word(&self, addr: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read(addr, &mut bytes).then(|| u64::from_ne_bytes(bytes))
    }
}

/// A reader of a live process for [`decode`](super::decode). It opens nothing before the first
/// read: most code objects need none.
pub fn memory(tgid: u32) -> impl FnMut(u64, &mut [u8]) -> bool {
    let mut opened = None;
    move |addr, into| {
        opened.get_or_insert_with(|| Memory::open(&Host::live(), tgid)).read(addr, into)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_its_own_process_and_nothing_that_is_not_mapped() {
        let secret = *b"0123456789abcdef";
        let addr = secret.as_ptr() as u64;
        let mut copy = [0; 16];
        let mut read = memory(std::process::id());
        assert!(read(addr, &mut copy));
        assert_eq!(copy, secret);
        for bad in [0, 1 << 47, u64::MAX - 4, u64::MAX] {
            assert!(!read(bad, &mut copy), "{bad:x}");
        }
        assert!(!memory(u32::MAX)(addr, &mut copy));
        let memory = Memory::open(&Host::live(), std::process::id());
        assert_eq!(memory.word(addr), Some(u64::from_ne_bytes(*b"01234567")));
    }
}
