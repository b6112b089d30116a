//! How fast a series grows, robustly.

use super::series::Series;

/// Complete buckets that an estimate needs after the warm-up.
const MIN_BUCKETS: usize = 8;

/// The first of this many parts of a series is warm-up: caches fill and say nothing of a leak.
const WARM_UP_PART: usize = 5;

/// Growth of a series over a stretch of time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Growth {
    /// Bytes a second, negative for shrinking.
    pub bytes_per_second: f64,
    /// Share of the pairs of buckets that rise: 1.0 rises always, 0.5 is noise. A steady value
    /// has 0.
    pub rising: f64,
    /// Where the stretch begins, after the warm-up.
    pub since_ns: i64,
    /// Where it ends.
    pub until_ns: i64,
}

/// Theil-Sen slope of the buckets' minima: the median of the slopes of all pairs.
///
/// Minima, because what a leak leaves behind shows in the troughs, whatever the peaks do; the
/// median, because one phase change (an evaluation, a checkpoint) must not read as a trend. The
/// first fifth is left out as warm-up, the last bucket because it is not complete. `None` while
/// there is too little to say anything.
pub fn growth(series: &Series) -> Option<Growth> {
    let origin_ns = series.origin_ns()?;
    let buckets = series.buckets();
    let complete = buckets.len().checked_sub(1)?;
    let first = complete.div_ceil(WARM_UP_PART);
    let minima: Vec<i64> = buckets.get(first..complete)?.iter().map(|bucket| bucket.min).collect();
    if minima.len() < MIN_BUCKETS {
        return None;
    }
    let width_s = series.width_ns() as f64 / 1e9;
    let (slope, rising) = theil_sen(&minima);
    let at_ns = |index: usize| origin_ns.saturating_add(series.width_ns() * index as i64);
    Some(Growth {
        bytes_per_second: slope / width_s,
        rising,
        since_ns: at_ns(first),
        until_ns: at_ns(complete),
    })
}

/// Median slope a step, and the share of pairs that rise. `values` must hold at least two.
pub(crate) fn theil_sen(values: &[i64]) -> (f64, f64) {
    let mut slopes: Vec<f64> = values
        .iter()
        .enumerate()
        .flat_map(|(index, &from)| {
            let later = values.iter().skip(index + 1).enumerate();
            later.map(move |(gap, &to)| (to as f64 - from as f64) / (gap as f64 + 1.0))
        })
        .collect();
    let rising = slopes.iter().filter(|&&slope| slope > 0.0).count() as f64 / slopes.len() as f64;
    let middle = slopes.len() / 2;
    let (_, median, _) = slopes.select_nth_unstable_by(middle, f64::total_cmp);
    (*median, rising)
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: i64 = 1_000_000_000;

    fn series(value: impl Fn(i64) -> i64) -> Series {
        let mut series = Series::default();
        for second in 0..100 {
            series.push(second * S, value(second));
            series.push(second * S + S / 2, value(second) + 1_000_000);
            series.push(second * S + S - 1, value(second));
        }
        series
    }

    fn rate(value: impl Fn(i64) -> i64) -> f64 {
        growth(&series(value)).unwrap().bytes_per_second
    }

    #[test]
    fn a_steady_leak_shows_under_large_peaks() {
        assert!((rate(|second| second * 4_096) - 4_096.0).abs() < 1.0);
    }

    #[test]
    fn warm_up_and_single_steps_are_no_growth() {
        let exactly_zero = |rate: f64| rate.abs() < f64::EPSILON;
        assert!(exactly_zero(rate(|second| second.min(15) * 1_000_000)), "warm-up");
        assert!(exactly_zero(rate(|second| if second == 60 { 0 } else { 500 })), "one dip");
        assert!(exactly_zero(rate(|_| 7)), "steady");
    }

    #[test]
    fn the_stretch_is_told() {
        let growth = growth(&series(|second| second)).unwrap();
        assert_eq!((growth.since_ns, growth.until_ns), (20 * S, 99 * S));
        assert!(growth.rising > 0.99);
    }

    #[test]
    fn too_little_says_nothing() {
        let mut series = Series::default();
        assert_eq!(growth(&series), None);
        for second in 0..10 {
            series.push(second * S, second);
        }
        assert_eq!(growth(&series), None);
    }
}
