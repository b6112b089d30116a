//! Parts that add up as they are printed.

/// The unit of a sum and its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    MiB,
    GiB,
}

impl Unit {
    /// The unit in which a sum is easy to read.
    pub(super) fn for_sum(bytes: i64) -> Self {
        if bytes.unsigned_abs() >= 10 << 30 { Self::GiB } else { Self::MiB }
    }

    const fn bytes(self) -> i128 {
        match self {
            Self::MiB => 1 << 20,
            Self::GiB => 1 << 30,
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::MiB => "MiB",
            Self::GiB => "GiB",
        }
    }
}

/// Rounds `parts` to tenths of a unit so that the rounded parts add up to the rounded sum: what
/// rounding leaves over goes to the parts that it hurts most, never to one that was exact.
pub(super) fn tenths(parts: &[i64], unit: Unit) -> (Vec<i64>, i64) {
    let unit = unit.bytes();
    let scaled: Vec<i128> = parts.iter().map(|part| i128::from(*part) * 10).collect();
    let mut rounded: Vec<i128> = scaled.iter().map(|part| part.div_euclid(unit)).collect();
    let sum: i128 = scaled.iter().sum();
    let total = (sum + unit / 2).div_euclid(unit);
    let left = (total - rounded.iter().sum::<i128>()).max(0) as usize;
    let mut by_rest: Vec<usize> = (0..parts.len()).collect();
    by_rest.sort_by_key(|&index| std::cmp::Reverse(scaled[index].rem_euclid(unit)));
    for index in by_rest.into_iter().take(left) {
        rounded[index] += 1;
    }
    (rounded.into_iter().map(|part| part as i64).collect(), total as i64)
}

/// `412.0` of tenths.
pub(super) fn show_tenths(tenths: i64) -> String {
    let sign = if tenths < 0 { "-" } else { "" };
    let size = tenths.unsigned_abs();
    format!("{sign}{}.{}", size / 10, size % 10)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn exact_parts_stay_exact() {
        let half = (1 << 20) / 20; // 0.05 MiB
        let parts = [412 << 20, 0, half, half];
        assert_eq!(tenths(&parts, Unit::MiB), (vec![4120, 0, 1, 0], 4121));
        assert_eq!(tenths(&[5 << 20, -(2 << 20)], Unit::MiB), (vec![50, -20], 30));
        assert_eq!(tenths(&[], Unit::GiB), (vec![], 0));
        assert_eq!((show_tenths(4120), show_tenths(-3)), ("412.0".into(), "-0.3".into()));
    }

    #[test]
    fn the_unit_follows_the_sum() {
        assert_eq!(Unit::for_sum((10 << 30) - 1), Unit::MiB);
        assert_eq!(Unit::for_sum(10 << 30), Unit::GiB);
        assert_eq!(tenths(&[31 << 30, 256 << 20], Unit::GiB), (vec![310, 3], 313));
    }

    proptest! {
        #[test]
        fn printed_parts_add_up_and_none_is_off_by_a_tenth(
            parts in prop::collection::vec(-(1i64 << 45)..1i64 << 45, 0..14),
            large in any::<bool>(),
        ) {
            let unit = if large { Unit::GiB } else { Unit::MiB };
            let (rounded, total) = tenths(&parts, unit);
            prop_assert_eq!(rounded.iter().sum::<i64>(), total);
            for (part, tenth) in parts.iter().zip(rounded) {
                let off = i128::from(tenth) * unit.bytes() - i128::from(*part) * 10;
                prop_assert!(off.abs() < unit.bytes(), "{part} printed as {tenth}");
            }
        }
    }
}
