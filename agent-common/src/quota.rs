//! How much of a ring that fills up one user may take, so that its loop can't blind the agent to the
//! others.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Windows of about an eighth of a second.
const WINDOW_SHIFT: u32 = 27;
/// Users' shares of the half that is kept free, in a window.
const SHARES: u64 = 8;

/// The limits, the only value of the map `QUOTA`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Quota {
    /// Up to here the ring is free to all, bytes.
    pub free_until_bytes: u64,
    /// What a user may add in a window above that, bytes; 0 = as much as fits.
    pub user_bytes: u64,
}

impl Quota {
    /// No limits.
    pub const NONE: Self = Self { free_until_bytes: 0, user_bytes: 0 };

    /// The limits of a ring of this size.
    pub const fn of_ring(ring_bytes: u32) -> Self {
        let half = ring_bytes as u64 / 2;
        Self { free_until_bytes: half, user_bytes: half / SHARES }
    }
}

/// Number of the window that a moment of `CLOCK_BOOTTIME` lies in.
pub const fn window_of(boot_ns: u64) -> u64 {
    boot_ns >> WINDOW_SHIFT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_alone_can_not_fill_what_is_kept_free() {
        let quota = Quota::of_ring(1 << 25);
        assert_eq!(quota.free_until_bytes, 1 << 24);
        assert!(quota.user_bytes * SHARES <= (1 << 25) - quota.free_until_bytes);
        assert_eq!(window_of(1_000_000_000), 7);
    }
}
