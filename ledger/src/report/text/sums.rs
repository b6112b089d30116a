//! Parts that add up as they are printed.

/// Rounds `parts` to tenths of a MiB so that the rounded parts add up to the rounded sum: what
/// rounding leaves over goes to the parts that it hurts most, never to one that was exact.
pub(super) fn tenths(parts: &[i64]) -> (Vec<i64>, i64) {
    let scaled: Vec<i128> = parts.iter().map(|part| i128::from(*part) * 10).collect();
    let mut rounded: Vec<i128> = scaled.iter().map(|part| part.div_euclid(UNIT)).collect();
    let sum: i128 = scaled.iter().sum();
    let total = (sum + UNIT / 2).div_euclid(UNIT);
    let left = (total - rounded.iter().sum::<i128>()).max(0) as usize;
    let mut by_rest: Vec<usize> = (0..parts.len()).collect();
    by_rest.sort_by_key(|&index| std::cmp::Reverse(scaled[index].rem_euclid(UNIT)));
    for index in by_rest.into_iter().take(left) {
        rounded[index] += 1;
    }
    (rounded.into_iter().map(|part| part as i64).collect(), total as i64)
}

const UNIT: i128 = 1 << 20;

/// `412.0 MiB` of tenths.
pub(super) fn show_tenths(tenths: i64) -> String {
    let sign = if tenths < 0 { "-" } else { "" };
    let size = tenths.unsigned_abs();
    format!("{sign}{}.{} MiB", size / 10, size % 10)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn exact_parts_stay_exact() {
        let half = (1 << 20) / 20; // 0.05 MiB
        assert_eq!(tenths(&[412 << 20, 0, half, half]), (vec![4120, 0, 1, 0], 4121));
        assert_eq!(tenths(&[5 << 20, -(2 << 20)]), (vec![50, -20], 30));
        assert_eq!(tenths(&[]), (vec![], 0));
        assert_eq!((show_tenths(4120), show_tenths(-3)), ("412.0 MiB".into(), "-0.3 MiB".into()));
    }

    proptest! {
        #[test]
        fn printed_parts_add_up_and_none_is_off_by_a_tenth(
            parts in prop::collection::vec(-(1i64 << 45)..1i64 << 45, 0..6),
        ) {
            let (rounded, total) = tenths(&parts);
            prop_assert_eq!(rounded.iter().sum::<i64>(), total);
            for (part, tenth) in parts.iter().zip(rounded) {
                let off = i128::from(tenth) * UNIT - i128::from(*part) * 10;
                prop_assert!(off.abs() < UNIT, "{part} printed as {tenth}");
            }
        }
    }
}
