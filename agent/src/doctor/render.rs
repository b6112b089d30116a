//! Checks as text.

use std::fmt::Write as _;

use super::{Check, Status};

/// One line a check, aligned, the remedy beneath.
pub fn render(checks: &[Check], color: bool) -> String {
    let width = checks.iter().map(|check| check.name.chars().count()).max().unwrap_or(0);
    let mut shown = String::new();
    for check in checks {
        let (mark, paint) = match check.status {
            Status::Ok => ('✓', "32"),
            Status::Warn => ('!', "33"),
            Status::Fail => ('✗', "31"),
        };
        let mark = if color { format!("\x1b[{paint}m{mark}\x1b[0m") } else { mark.to_string() };
        // Writing to a String cannot fail.
        let _infallible = writeln!(shown, "{mark} {:width$}  {}", check.name, check.value);
        if let Some(remedy) = &check.remedy {
            let _infallible = writeln!(shown, "  {:width$}  -> {remedy}", "");
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some() -> [Check; 3] {
        [
            Check::ok("kernel", "6.18"),
            Check::warn("UCX", "mapped", "restart"),
            Check::fail("privileges", "none", "use sudo"),
        ]
    }

    #[test]
    fn lines_are_aligned_and_remedies_stand_beneath() {
        let expected = "\
✓ kernel      6.18
! UCX         mapped
              -> restart
✗ privileges  none
              -> use sudo
";
        assert_eq!(render(&some(), false), expected);
        assert_eq!(render(&[], false), "");
    }

    #[test]
    fn color_paints_the_mark_only() {
        let painted = render(&some(), true);
        assert!(painted.starts_with("\x1b[32m✓\x1b[0m kernel      6.18\n"));
        let plain = ["\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[0m"]
            .iter()
            .fold(painted, |text, code| text.replace(code, ""));
        assert_eq!(plain, render(&some(), false));
    }

    #[test]
    fn json_has_the_four_fields() {
        let json = serde_json::to_value(&some()[1]).unwrap();
        let expected = serde_json::json!({
            "name": "UCX", "status": "warn", "value": "mapped", "remedy": "restart",
        });
        assert_eq!(json, expected);
    }
}
