//! Numbers as people read them: IEC sizes as `nvidia-smi` counts, rates, durations.

use std::fmt::Write as _;

const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
const MIB: f64 = 1_048_576.0;

/// Bytes as people read them: `0 B`, `1.0 KiB`, `412.0 MiB`, `-3.2 GiB`.
pub fn show_bytes(bytes: i64) -> String {
    let sign = if bytes < 0 { "-" } else { "" };
    let size = bytes.unsigned_abs();
    if size < 1024 {
        return format!("{sign}{size} B");
    }
    let mut value = size as f64 / 1024.0;
    let mut unit = 1;
    // 1023.96 KiB would read as 1024.0 KiB.
    while (value * 10.0).round() >= 10_240.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{sign}{value:.1} {}", UNITS[unit])
}

/// A rate in the unit of time that makes it at least a MiB, if one does.
pub(super) fn show_rate(bytes_per_second: f64) -> String {
    let (factor, unit) = if bytes_per_second.abs() >= MIB {
        (1.0, "s")
    } else if bytes_per_second.abs() * 60.0 >= MIB {
        (60.0, "min")
    } else {
        (3600.0, "h")
    };
    format!("{}/{unit}", show_bytes((bytes_per_second * factor) as i64))
}

/// A stretch of time: `12.3 s`, `4 min 5 s`, `3 h 12 min`, `2 d 4 h`.
pub(super) fn show_duration(ns: i64) -> String {
    let seconds = ns.max(0) as f64 / 1e9;
    let whole = seconds.round() as i64;
    match whole {
        ..120 => format!("{seconds:.1} s"),
        120..7_200 => format!("{} min {} s", whole / 60, whole % 60),
        7_200..172_800 => format!("{} h {} min", whole / 3_600, whole % 3_600 / 60),
        _ => format!("{} d {} h", whole / 86_400, whole % 86_400 / 3_600),
    }
}

/// A count with its thousands set apart: `18,204`.
pub(super) fn show_count(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A count with the word for it: `1 process`, `1,204 events`.
pub(super) fn counted(count: u64, one: &str, many: &str) -> String {
    let mut text = show_count(count);
    // Writing to a String cannot fail.
    write!(text, " {}", if count == 1 { one } else { many }).unwrap_or_default();
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_iec_and_never_read_1024() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (412 << 20, "412.0 MiB"),
            ((1 << 20) - 1, "1.0 MiB"),
            (-(16 << 30) / 5, "-3.2 GiB"),
            (1 << 50, "1.0 PiB"),
            (i64::MAX, "8.0 EiB"),
            (i64::MIN, "-8.0 EiB"),
        ] {
            assert_eq!(show_bytes(bytes), text, "{bytes}");
        }
    }

    #[test]
    fn rates_choose_their_unit_of_time() {
        assert_eq!(show_rate(24.0 * MIB), "24.0 MiB/s");
        assert_eq!(show_rate(MIB / 4.0), "15.0 MiB/min");
        assert_eq!(show_rate(1024.0), "3.5 MiB/h");
        assert_eq!(show_rate(-2.0 * MIB), "-2.0 MiB/s");
    }

    #[test]
    fn durations_and_counts() {
        for (seconds, text) in [
            (0.04, "0.0 s"),
            (12.34, "12.3 s"),
            (119.97, "2 min 0 s"),
            (245.0, "4 min 5 s"),
            (11_520.0, "3 h 12 min"),
            (187_200.0, "2 d 4 h"),
        ] {
            assert_eq!(show_duration((seconds * 1e9) as i64), text);
        }
        assert_eq!(show_duration(-5), "0.0 s");
        assert_eq!(counted(1, "process", "processes"), "1 process");
        assert_eq!(counted(1_204_000, "event", "events"), "1,204,000 events");
        assert_eq!(show_count(999), "999");
    }
}
