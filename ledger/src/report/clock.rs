//! Times of day, UTC, the date said once.

use jiff::{Timestamp, civil::Date, tz::TimeZone};

/// Tells times against the day on which the log begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    day: Option<Date>,
}

fn civil(ns: i64) -> jiff::civil::DateTime {
    // Every i64 of nanoseconds lies in jiff's range; the epoch stands in for what cannot happen.
    let timestamp = Timestamp::from_nanosecond(i128::from(ns)).unwrap_or_default();
    TimeZone::UTC.to_datetime(timestamp)
}

impl Clock {
    /// A clock whose day is that of `start_ns`.
    pub(super) fn new(start_ns: Option<i64>) -> Self {
        Self { day: start_ns.map(|ns| civil(ns).date()) }
    }

    /// `14:03:22`, with the date before it where it is another day.
    pub(super) fn time(self, ns: i64) -> String {
        let moment = civil(ns);
        let other_day = self.day.is_some_and(|day| day != moment.date());
        moment.strftime(if other_day { "%Y-%m-%d %H:%M:%S" } else { "%H:%M:%S" }).to_string()
    }

    /// `2026-11-30 14:03:22`.
    pub(super) fn date_time(ns: i64) -> String {
        civil(ns).strftime("%Y-%m-%d %H:%M:%S").to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOON: i64 = 1_796_040_000_000_000_000;

    #[test]
    fn the_date_is_said_only_of_another_day() {
        let clock = Clock::new(Some(NOON));
        assert_eq!(Clock::date_time(NOON), "2026-11-30 12:00:00");
        assert_eq!(clock.time(NOON + 59_999_999_999), "12:00:59");
        assert_eq!(clock.time(NOON + 86_400_000_000_000), "2026-12-01 12:00:00");
        assert_eq!(Clock::new(None).time(NOON), "12:00:00");
    }

    #[test]
    fn absurd_times_do_no_harm() {
        let clock = Clock::new(Some(0));
        assert!(clock.time(i64::MAX).starts_with("2262-"));
        assert!(clock.time(i64::MIN).starts_with("1677-"));
    }
}
