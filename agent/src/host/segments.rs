//! Where a process has the parts of an ELF file.

use object::{ObjectSegment as _, SegmentFlags};

use super::Mapping;

/// A part of the file that is loaded.
#[derive(Clone, Copy, Debug)]
struct Segment {
    addr: u64,
    offset: u64,
    executable: bool,
}

/// The parts of an ELF file that are loaded.
#[derive(Clone, Debug, Default)]
pub struct Segments(Vec<Segment>);

impl Segments {
    /// Those of a file.
    pub fn of<'a>(elf: &impl object::Object<'a>) -> Self {
        let segments = elf.segments().map(|segment| Segment {
            addr: segment.address(),
            offset: segment.file_range().0,
            executable: matches!(segment.flags(), SegmentFlags::Elf { p_flags }
                if p_flags & object::elf::PF_X != 0),
        });
        Self(segments.collect())
    }

    /// How much higher a process has the file than the file says, by all its mappings of it.
    pub fn bias(&self, mappings: &[&Mapping]) -> Option<u64> {
        let page = !(rustix::param::page_size() as u64 - 1);
        let pairs = mappings.iter().flat_map(|map| self.0.iter().map(move |part| (map, part)));
        let mut fitting = pairs.filter(|(map, part)| {
            map.offset == part.offset & page && map.executable == part.executable
        });
        // Two segments may share a page of the file, but only one is executable.
        let best = fitting.clone().find(|(map, _)| map.executable).or_else(|| fitting.next());
        best.map(|(map, part)| map.start.wrapping_sub(part.addr & page))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(start: u64, offset: u64, executable: bool) -> Mapping {
        let path = "/usr/bin/python3".into();
        let end = start + 0x1000;
        Mapping { start, end, executable, offset, dev: (8, 1), inode: 7, path, deleted: false }
    }

    #[test]
    fn the_bias_comes_from_the_executable_segment() {
        let segment = |addr, offset, executable| Segment { addr, offset, executable };
        let segments = Segments(vec![
            segment(0x40_0000, 0, false),
            segment(0x40_2345, 0x1345, true),
            segment(0x40_4345, 0x1999, false),
        ]);
        let (low, code, data) = (
            mapping(0x7000, 0, false),
            mapping(0x9000, 0x1000, true),
            mapping(0xb000, 0x1000, false),
        );
        let bias = 0x9000_u64.wrapping_sub(0x40_2000);
        assert_eq!(segments.bias(&[&low, &data, &code]), Some(bias));
        assert_eq!(segments.bias(&[&low]), Some(0x7000_u64.wrapping_sub(0x40_0000)));
        assert_eq!(segments.bias(&[&mapping(0x7000, 0x8000, true)]), None);
        assert_eq!(Segments::default().bias(&[&low]), None);
    }
}
