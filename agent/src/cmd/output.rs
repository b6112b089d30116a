//! Where the log goes, checked before any program starts, and to whom it belongs.

use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// Fills `%h` (host), `%t` (time, `20261130T140322`) and `%%` in.
pub(super) fn fill_template(template: &Path, host: &str, time: &str) -> PathBuf {
    let text = template.to_string_lossy();
    let mut filled = String::with_capacity(text.len());
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        match (c, if c == '%' { rest.next() } else { None }) {
            ('%', Some('h')) => filled.push_str(host),
            ('%', Some('t')) => filled.push_str(time),
            ('%', Some('%')) => filled.push('%'),
            ('%', Some(other)) => {
                filled.push('%');
                filled.push(other);
            }
            (c, _) => filled.push(c),
        }
    }
    PathBuf::from(filled)
}

/// The log's folder for this run, absolute.
pub(super) fn folder(template: &Path) -> anyhow::Result<PathBuf> {
    let host = rustix::system::uname();
    let host = host.nodename().to_string_lossy().replace('/', "_");
    let time = jiff::Zoned::now().strftime("%Y%m%dT%H%M%S").to_string();
    let folder = fill_template(template, &host, &time);
    std::path::absolute(&folder).with_context(|| format!("resolve {}", folder.display()))
}

/// The user on whose behalf `sudo` runs us: logs belong to them and traced programs run as them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    /// User id.
    pub(super) uid: u32,
    /// Group id.
    pub(super) gid: u32,
}

/// Who called `sudo`; `None` where nobody did, or root.
pub(super) fn sudo_owner() -> Option<Owner> {
    let id = |name| std::env::var(name).ok()?.parse().ok();
    let owner = Owner { uid: id("SUDO_UID")?, gid: id("SUDO_GID")? };
    (is_root() && owner.uid != 0).then_some(owner)
}

/// HOME, USER and LOGNAME of the user who called `sudo`, which had replaced them.
pub(super) fn user_environment(owner: &Owner) -> Vec<(&'static str, String)> {
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let entry = passwd.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        (fields.get(2)?.parse() == Ok(owner.uid)).then(|| (fields[0], fields.get(5).copied()))
    });
    let user = std::env::var("SUDO_USER").ok().or(entry.map(|(name, _)| name.to_owned()));
    let home = entry.and_then(|(_, home)| home).map(str::to_owned);
    let named = user.into_iter().flat_map(|user| [("USER", user.clone()), ("LOGNAME", user)]);
    named.chain(home.map(|home| ("HOME", home))).collect()
}

/// The effective user is root.
pub(super) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates() {
        let fill = |text: &str| fill_template(Path::new(text), "node7", "20261130T140322");
        assert_eq!(fill("vramscope-%h-%t"), Path::new("vramscope-node7-20261130T140322"));
        assert_eq!(fill("100%%/%x/%"), Path::new("100%/%x/%"));
        assert_eq!(fill("plain"), Path::new("plain"));
    }
}
