//! Sizes and times as people type and read them. Sizes are IEC, as `nvidia-smi` counts.

use std::time::Duration;

/// Parses `512`, `500m`, `10GiB`, `1.5g`.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let (number, unit) = split(text);
    let shift = match unit.to_ascii_lowercase().trim_end_matches("ib").trim_end_matches('b') {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err(format!("{unit:?} is no unit of size; use k, m, g or t, as in 500m")),
    };
    scale(number, f64::from(1u32 << 10).powi(shift / 10))
        .map(|bytes| bytes as u64)
        .ok_or_else(|| format!("{text:?} is no size; write 500m or 10GiB"))
}

/// Parses `30`, `30s`, `5m`, `2h`, `1d`.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split(text);
    let seconds = match unit {
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86400.0,
        "ms" => 0.001,
        _ => return Err(format!("{unit:?} is no unit of time; use s, m, h or d, as in 10m")),
    };
    scale(number, seconds)
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .ok_or_else(|| format!("{text:?} is no time; write 30s or 10m"))
}

/// Bytes as people read them: `0 B`, `1.0 KiB`, `412.0 MiB`, `-3.2 GiB`.
pub fn show_bytes(bytes: i64) -> String {
    ledger::report::show_bytes(bytes)
}

fn split(text: &str) -> (&str, &str) {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    (&text[..end], text[end..].trim())
}

fn scale(number: &str, factor: f64) -> Option<f64> {
    let value: f64 = number.parse().ok()?;
    let scaled = value * factor;
    (scaled.is_finite() && (0.0..9e18).contains(&scaled)).then_some(scaled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_iec() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("500m", 500 << 20),
            ("10GiB", 10 << 30),
            ("1.5g", 3 << 29),
            ("2KB", 2048),
            (" 1 T ", 1 << 40),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "m", "-1", "1.2.3", "5 parsecs", "1e99t", "9999999999t"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn times_have_units() {
        assert_eq!(parse_duration("90"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_duration("10m"), Ok(Duration::from_mins(10)));
        assert_eq!(parse_duration("1.5h"), Ok(Duration::from_mins(90)));
        assert!(parse_duration("soon").is_err());
        assert!(parse_duration("-3s").is_err());
    }
}
