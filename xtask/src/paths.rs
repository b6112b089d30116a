//! Finding paths of a machine in text and in binary files.

/// The offsets at which `prefix` (`/opt/x/`) begins a path, rather than continuing one, as it does
/// in `/proc/1/opt/x/`.
pub(crate) fn occurrences<'a>(
    bytes: &'a [u8],
    prefix: &'a str,
) -> impl Iterator<Item = usize> + 'a {
    let found = bytes.windows(prefix.len()).enumerate();
    found
        .filter(move |(at, window)| {
            *window == prefix.as_bytes() && begins_a_path(bytes[..*at].last())
        })
        .map(|(at, _)| at)
}

fn begins_a_path(before: Option<&u8>) -> bool {
    before.is_none_or(|byte| !byte.is_ascii_alphanumeric() && !b"_-.~*>})]$".contains(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_found_where_it_begins_and_not_inside_another() {
        for (text, expected) in [
            ("/opt/x/a", 1),
            ("PATH=/bin:/opt/x/bin \"/opt/x/b\"", 2),
            ("\0/opt/x/a\0", 1),
            ("/proc/1/opt/x/a", 0),
            ("{pid}/opt/x/a", 0),
        ] {
            assert_eq!(occurrences(text.as_bytes(), "/opt/x/").count(), expected, "{text}");
        }
    }
}
