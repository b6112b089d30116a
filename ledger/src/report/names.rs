//! What processes and devices are called in sentences and tables.

use super::model::{Device, Model, Process, Share};
use crate::rows::ProcessRow;

/// Interpreters, whose script says more than they do.
const INTERPRETERS: [&str; 4] = ["python", "pypy", "bash", "sh"];

/// The short name of a process: its script, else its program, else its main thread's name.
pub(super) fn short_name(row: &ProcessRow) -> String {
    let command = row.command.as_deref().unwrap_or_default();
    let mut words = command.split_whitespace();
    let Some(program) = words.next().map(base_name).filter(|name| !name.is_empty()) else {
        return row.comm.clone();
    };
    let bare = program.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.');
    if !INTERPRETERS.contains(&bare) {
        return program.to_owned();
    }
    let mut after_m = false;
    for word in words {
        match word {
            "-m" => after_m = true,
            _ if after_m => return word.to_owned(),
            _ if word.starts_with('-') => {}
            _ => return base_name(word).to_owned(),
        }
    }
    program.to_owned()
}

fn base_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Text of others, fit for a terminal: no control characters, which could move the cursor or
/// change what was printed before.
pub(super) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// `pid 4824 rank 2 (leak_job.py)`; the host is named where the log is of several.
pub(super) fn process(model: &Model, process: &Process) -> String {
    let host = match &process.host {
        Some(host) if model.hosts.len() > 1 => format!(" on {}", printable(host)),
        _ => String::new(),
    };
    let rank = process.rank.map(|rank| format!(" rank {rank}")).unwrap_or_default();
    let name = match process.name.as_str() {
        "" => String::new(),
        name => format!(" ({})", printable(name)),
    };
    format!("pid {}{host}{rank}{name}", process.pid)
}

/// `rank 3 (pid 4824)`, by its rank where it has one, else as [`process`] does.
pub(super) fn ranked(model: &Model, of: &Process) -> String {
    let Some(rank) = of.rank else { return process(model, of) };
    let host = match &of.host {
        Some(host) if model.hosts.len() > 1 => format!(" on {}", printable(host)),
        _ => String::new(),
    };
    format!("rank {rank} (pid {}){host}", of.pid)
}

/// `GPU 1`, by NVML's number; a MIG instance by its UUID, since it shares its GPU's number.
pub(super) fn device(device: &Device) -> String {
    match device.nvml_index {
        Some(index) if !device.gpu_uuid.starts_with("MIG-") => format!("GPU {index}"),
        _ => printable(&device.gpu_uuid),
    }
}

/// The device of a share.
pub(super) fn device_of(model: &Model, share: &Share) -> String {
    let known = share.gpu_uuid.as_deref();
    let listed = known.and_then(|uuid| model.devices.iter().find(|d| d.gpu_uuid == uuid));
    match (listed, known, share.cuda_ordinal) {
        (Some(listed), ..) => device(listed),
        (None, Some(uuid), _) => printable(uuid),
        (None, None, Some(ordinal)) => format!("its CUDA device {ordinal}"),
        (None, None, None) => "a GPU that is not known".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_names_an_interpreter() {
        for (command, name) in [
            ("/usr/bin/python3.11 -u /data/u/leak_job.py --lr 1", "leak_job.py"),
            ("python3 -m torch.distributed.run train.py", "torch.distributed.run"),
            ("python3", "python3"),
            ("./w1 10", "w1"),
            ("/opt/trtis/bin/tritonserver --model x", "tritonserver"),
            ("", "comm"),
            ("   ", "comm"),
        ] {
            let row = ProcessRow {
                comm: "comm".to_owned(),
                command: Some(command.to_owned()),
                ..ProcessRow::default()
            };
            assert_eq!(short_name(&row), name, "{command}");
        }
    }

    #[test]
    fn names_cannot_write_to_the_terminal() {
        assert_eq!(printable("a\x1b[2Jb\n"), "a\u{fffd}[2Jb\u{fffd}");
    }
}
