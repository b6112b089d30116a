//! Whether a series of live bytes grows until its end, and by how much.
//!
//! What is judged is what never came back: at each time the lowest value that is still to come,
//! which peaks and sawteeth do not move. The rate is the account's robust slope of that.

use crate::account::state::{Growth, Series, growth};

/// A shorter stretch after the warm-up says nothing.
const MIN_SPAN_NS: i64 = 3_000_000_000;
/// Share of the pairs of buckets that must rise. Four plateaus have 0.75: a few steps are phases
/// of a program, not growth.
pub(super) const MIN_RISING: f64 = 0.8;
/// Standard deviations by which the troughs' order must differ from chance. Short noise often has
/// its lowest value early.
pub(super) const MIN_BEYOND_CHANCE: f64 = 3.0;
/// Longest end of a program in which it may give back what it held, unless it ran for long.
const CLEAN_UP_NS: i64 = 2_000_000_000;
/// Growth below this, and below a hundredth of the device, is not worth a finding.
pub(super) const MATERIAL_BYTES: i64 = 16 << 20;

/// How a series went.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Trend {
    /// Robust rate.
    pub(super) bytes_per_second: f64,
    /// Begin of the stretch, after the warm-up.
    pub(super) since_ns: i64,
    /// Its end.
    pub(super) until_ns: i64,
    /// Lowest value to come, as of the begin.
    pub(super) from_bytes: i64,
    /// The same, as of the end.
    pub(super) to_bytes: i64,
    /// It grew, materially, and until the end.
    pub(super) grows: bool,
}

/// When a series ends and with what.
#[derive(Clone, Copy, Debug)]
pub(super) struct End {
    /// Last moment at which the value held.
    pub(super) ns: i64,
    /// The value.
    pub(super) bytes: i64,
    /// The process ended, so what it gave back just before was its end, not its habit.
    pub(super) of_process: bool,
}

/// Judges a series. `None` where it is too short to tell.
pub(super) fn judge(series: &Series, end: End, device_bytes: Option<i64>) -> Option<Trend> {
    let mut series = series.clone();
    series.push(end.ns, end.bytes);
    let minima = minima(&series, end.of_process)?;
    let stays = what_stays(&series, &minima)?;
    let growth = growth(&stays)?;
    if growth.until_ns - growth.since_ns < MIN_SPAN_NS {
        return None;
    }
    let kept = stretch(&stays, &growth);
    let troughs = minima.get(begin_of(&series, &growth)..)?;
    let (&from_bytes, &to_bytes) = (kept.first()?, kept.last()?);
    let seconds = (growth.until_ns - growth.since_ns) as f64 / 1e9;
    let grown =
        ((growth.bytes_per_second * seconds) as i64).min(to_bytes.saturating_sub(from_bytes));
    let material = device_bytes.map_or(MATERIAL_BYTES, |bytes| MATERIAL_BYTES.min(bytes / 100));
    let is_growth = growth.rising >= MIN_RISING
        && grown > material
        && beyond_chance(troughs) >= MIN_BEYOND_CHANCE
        && rises_until_its_end(&kept);
    Some(Trend {
        bytes_per_second: growth.bytes_per_second,
        since_ns: growth.since_ns,
        until_ns: growth.until_ns,
        from_bytes,
        to_bytes,
        grows: is_growth,
    })
}

/// The lowest values of the complete buckets.
pub(super) fn minima(series: &Series, of_process: bool) -> Option<Vec<i64>> {
    let complete = series.buckets().len().checked_sub(1)?;
    let mut minima: Vec<i64> =
        series.buckets().iter().take(complete).map(|bucket| bucket.min).collect();
    if of_process {
        leave_clean_up_out(&mut minima, series.width_ns());
    }
    Some(minima)
}

/// What never came back: for each bucket, the lowest value from there on.
fn what_stays(series: &Series, minima: &[i64]) -> Option<Series> {
    let origin_ns = series.origin_ns()?;
    let mut kept = minima.to_vec();
    let mut lowest = i64::MAX;
    for value in kept.iter_mut().rev() {
        lowest = lowest.min(*value);
        *value = lowest;
    }
    let mut stays = Series::default();
    let begin_ns = |index: usize| origin_ns.saturating_add(series.width_ns() * index as i64);
    for (index, value) in kept.iter().enumerate() {
        // Just before its bucket begins, so that the value before it is not this bucket's lowest.
        let before_ns = i64::from(index > 0);
        stays.push(begin_ns(index) - before_ns, *value);
    }
    stays.push(begin_ns(kept.len()), *kept.last()?);
    Some(stays)
}

/// Mann and Kendall's test: by how many standard deviations of chance the order of the values
/// differs from no order.
pub(super) fn beyond_chance(values: &[i64]) -> f64 {
    let pairs = values.iter().enumerate().flat_map(|(index, first)| {
        values[index + 1..].iter().map(move |second| second.cmp(first) as i64)
    });
    let rises_less_falls: i64 = pairs.sum();
    let n = values.len() as f64;
    rises_less_falls as f64 / (n * (n - 1.0) * (2.0 * n + 5.0) / 18.0).sqrt()
}

/// Cuts what follows the highest trough where that is only a short time: programs that free all
/// just before they end have grown until then all the same.
pub(super) fn leave_clean_up_out(minima: &mut Vec<i64>, width_ns: i64) {
    let highest = minima.iter().enumerate().max_by_key(|(_, value)| **value);
    let Some((highest, _)) = highest else { return };
    let after = minima.len() - 1 - highest;
    let short = (CLEAN_UP_NS / width_ns).max(2) as usize;
    if after <= short.max(minima.len() / 20) {
        minima.truncate(highest + 1);
    }
}

/// The values from the begin of the growth to its end.
fn stretch(series: &Series, growth: &Growth) -> Vec<i64> {
    let length = (growth.until_ns - growth.since_ns) / series.width_ns();
    let stretch = series.buckets().iter().skip(begin_of(series, growth)).take(length as usize);
    stretch.map(|bucket| bucket.min).collect()
}

/// The bucket of `series`, which may be of another width, with which the growth begins.
fn begin_of(series: &Series, growth: &Growth) -> usize {
    let origin_ns = series.origin_ns().unwrap_or(0);
    ((growth.since_ns - origin_ns) / series.width_ns()).max(0) as usize
}

/// Whether it still rises in its last third, and the flat piece at its end is no longer than the
/// flat pieces within.
pub(super) fn rises_until_its_end(kept: &[i64]) -> bool {
    let rises: Vec<usize> =
        kept.windows(2).enumerate().filter(|(_, pair)| pair[0] < pair[1]).map(|(i, _)| i).collect();
    let Some(&last) = rises.last() else { return false };
    let steps = kept.len() - 1;
    let longest_gap = rises.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(1);
    let tail = steps - 1 - last;
    last >= steps * 2 / 3 && tail <= (2 * longest_gap).max(steps / 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: i64 = 1_000_000_000;
    const MIB: i64 = 1 << 20;

    /// Ten values a second, held until the end.
    fn trend_of(seconds: i64, of_process: bool, value: impl Fn(i64) -> i64) -> Option<Trend> {
        let mut series = Series::default();
        let mut last = 0;
        for tenth in 0..seconds * 10 {
            let now = value(tenth);
            if tenth == 0 || now != last {
                series.push(tenth * S / 10, now);
            }
            last = now;
        }
        judge(&series, End { ns: seconds * S, bytes: last, of_process }, Some(80 << 30))
    }

    fn grows(seconds: i64, value: impl Fn(i64) -> i64) -> bool {
        trend_of(seconds, false, value).is_some_and(|trend| trend.grows)
    }

    #[test]
    fn a_steady_leak_is_growth_with_its_rate() {
        let trend = trend_of(60, false, |tenth| tenth * MIB).unwrap();
        assert!(trend.grows);
        assert!((trend.bytes_per_second / MIB as f64 - 10.0).abs() < 0.5, "{trend:?}");
    }

    #[test]
    fn a_leak_is_growth_however_long_it_lasts() {
        for seconds in (30..1_200).step_by(37).chain([509, 510, 511, 512, 513, 1_023, 1_025]) {
            assert!(grows(seconds, |tenth| tenth * MIB), "{seconds} s");
            let finished = trend_of(seconds, true, |tenth| tenth * MIB);
            assert!(finished.is_some_and(|trend| trend.grows), "{seconds} s");
        }
    }

    #[test]
    fn a_leak_under_a_sawtooth_is_growth_and_the_sawtooth_alone_is_not() {
        let tooth = |tenth: i64| tenth % 17 * 100 * MIB;
        assert!(grows(60, |tenth| tooth(tenth) + tenth * MIB));
        assert!(!grows(60, tooth));
        assert!(!grows(60, |tenth| tenth % 200 * 50 * MIB), "slow teeth");
        assert!(!grows(60, |tenth| (tenth + 150) % 300 * 50 * MIB), "slow teeth, half at the end");
    }

    /// Up to 4 GiB, different for every time and seed.
    fn noise(seed: i64, tenth: i64) -> i64 {
        let mixed = (seed * 1_000_003 + tenth).wrapping_mul(0x9e37_79b9_7f4a_7c15_u64 as i64);
        ((mixed ^ (mixed >> 29)).wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33).rem_euclid(4_096) * MIB
    }

    #[test]
    fn noise_is_no_growth_whatever_its_size_and_hides_none_that_exceeds_it() {
        for len in [12, 13, 16, 20, 30, 60] {
            println!("FP {len} {}", (0..2000).filter(|s| grows(len, |t| noise(*s, t))).count());
        }
        for seed in 0..200 {
            assert!(!grows(60, |tenth| noise(seed, tenth)), "seed {seed}");
            assert!(!grows(20, |tenth| noise(seed, tenth)), "seed {seed}, short");
            assert!(grows(120, |tenth| noise(seed, tenth) + tenth * 20 * MIB), "seed {seed}, leak");
        }
    }

    #[test]
    fn steps_and_plateaus_are_phases() {
        assert!(!grows(60, |tenth| if tenth < 300 { 0 } else { 900 * MIB }), "one step");
        assert!(!grows(60, |tenth| tenth / 200 * 900 * MIB), "three plateaus");
        assert!(grows(60, |tenth| tenth / 50 * 64 * MIB), "twelve steps");
    }

    #[test]
    fn growth_that_stopped_is_not_growth() {
        assert!(!grows(100, |tenth| tenth.min(150) * MIB), "warm-up");
        assert!(!grows(100, |tenth| tenth.min(500) * MIB), "half");
        assert!(!grows(100, |tenth| tenth.min(800) * MIB), "loading, then work");
        assert!(grows(100, |tenth| tenth.min(980) * MIB), "until just before the end");
    }

    #[test]
    fn no_event_after_a_burst_is_a_flat_stretch_not_a_short_one() {
        assert!(!grows(120, |tenth| tenth.min(200) * MIB));
    }

    #[test]
    fn a_slow_leak_shows_once_it_is_material() {
        let slow = |tenth: i64| tenth / 10 * 102_400;
        assert!(!grows(60, slow), "6 MiB");
        assert!(grows(400, slow), "31 MiB after the warm-up");
    }

    #[test]
    fn a_hundredth_of_a_small_device_is_material() {
        let mut series = Series::default();
        for second in 0..60 {
            series.push(second * S, second * MIB / 4);
        }
        let end = End { ns: 60 * S, bytes: 15 * MIB, of_process: false };
        assert!(!judge(&series, end, Some(80 << 30)).unwrap().grows);
        assert!(judge(&series, end, Some(1 << 30)).unwrap().grows);
        assert!(!judge(&series, end, None).unwrap().grows);
    }

    #[test]
    fn freeing_all_at_the_very_end_hides_nothing_of_an_ended_process() {
        let leak = |tenth: i64| if tenth < 280 { tenth * MIB } else { 0 };
        assert!(trend_of(30, true, leak).unwrap().grows);
        assert!(!trend_of(30, false, leak).unwrap().grows, "a running one gave it back");
        let half = |tenth: i64| if tenth < 150 { tenth * MIB } else { 0 };
        assert!(!trend_of(30, true, half).unwrap().grows);
    }

    #[test]
    fn too_short_says_nothing() {
        assert_eq!(trend_of(2, false, |tenth| tenth * MIB), None);
        assert_eq!(
            judge(&Series::default(), End { ns: 0, bytes: 0, of_process: true }, None),
            None
        );
    }
}
