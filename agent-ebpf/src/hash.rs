//! Keys of stacks: FNV-1a over words (<http://www.isthe.com/chongo/tech/comp/fnv/>).

/// Where a hash begins.
pub(crate) const SEED: u64 = 0xcbf2_9ce4_8422_2325;

/// Takes a word in.
#[inline(always)]
pub(crate) fn mix(hash: u64, word: u64) -> u64 {
    // The product alone leaves the low bits to the low bits: addresses differ in the middle.
    let product = (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3);
    product ^ product >> 32
}
