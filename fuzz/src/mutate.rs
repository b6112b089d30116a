//! Changes inputs at random, the same way for the same seed.

/// Numbers that parsers compare with.
const TELLING: [u64; 12] = [
    0,
    1,
    7,
    8,
    0x7f,
    0x80,
    0xff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    0x7fff_ffff_ffff_ffff,
    u64::MAX,
];
/// Changes to one input at most.
const CHANGES: u64 = 12;
/// Bytes that one change inserts or removes at most.
const BLOCK: u64 = 64;

/// A sequence of numbers that looks random (splitmix64).
#[derive(Clone, Copy, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence of a seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below the limit; 0 where that is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.number().checked_rem(limit).unwrap_or(0)
    }
}

/// An input made of one or two of the seeds.
pub fn mutated(random: &mut Random, seeds: &[Vec<u8>], longest: usize) -> Vec<u8> {
    let mut pick = || {
        let at = random.below(seeds.len() as u64) as usize;
        seeds.get(at).cloned().unwrap_or_default()
    };
    let (mut data, other) = (pick(), pick());
    for _ in 0..=random.below(CHANGES) {
        change(random, &mut data, &other);
    }
    data.truncate(longest);
    data
}

fn change(random: &mut Random, data: &mut Vec<u8>, other: &[u8]) {
    let at = random.below(data.len() as u64) as usize;
    match random.below(8) {
        0 => overwrite(data, at, &[random.number() as u8]),
        1 => {
            let bit = 1_u8 << random.below(8);
            let flipped = data.get(at).map(|byte| byte ^ bit);
            overwrite(data, at, flipped.as_slice());
        }
        2 | 3 => {
            let number = telling(random).wrapping_add(random.below(5)).wrapping_sub(2);
            let width = 1 << random.below(4);
            overwrite(data, at, number.to_le_bytes().get(..width).unwrap_or_default());
        }
        4 => {
            let end = data.len().min(at + random.below(BLOCK) as usize);
            data.drain(at..end);
        }
        5 => {
            let block = piece(random, other).to_vec();
            data.splice(at..at, block);
        }
        6 => {
            let block = piece(random, other).to_vec();
            overwrite(data, at, &block);
        }
        _ => {
            let block: Vec<u8> = (0..random.below(BLOCK)).map(|_| random.number() as u8).collect();
            data.splice(at..at, block);
        }
    }
}

fn telling(random: &mut Random) -> u64 {
    TELLING.get(random.below(TELLING.len() as u64) as usize).copied().unwrap_or(0)
}

fn overwrite(data: &mut [u8], at: usize, with: &[u8]) {
    for (byte, new) in data.iter_mut().skip(at).zip(with) {
        *byte = *new;
    }
}

fn piece<'a>(random: &mut Random, other: &'a [u8]) -> &'a [u8] {
    let from = random.below(other.len() as u64) as usize;
    let to = other.len().min(from + random.below(BLOCK) as usize);
    other.get(from..to).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_makes_the_same_inputs_again() {
        let seeds = [b"first".to_vec(), vec![7; 300], Vec::new()];
        let made = |seed| {
            let mut random = Random::new(seed);
            (0..500).map(|_| mutated(&mut random, &seeds, 200)).collect::<Vec<_>>()
        };
        assert_eq!(made(1), made(1));
        assert_ne!(made(1), made(2));
        assert!(made(3).iter().all(|data| data.len() <= 200));
    }
}
