//! Commands whose work happens outside the child's own tree of processes: recording that tree would
//! show nothing.

use std::{ffi::OsString, path::Path};

/// What to say instead of running `command`; `None` where its work is its own.
pub(super) fn hint(command: &[OsString]) -> Option<String> {
    let words: Vec<&str> = command.iter().filter_map(|word| word.to_str()).collect();
    let program = Path::new(words.first()?).file_name()?.to_str()?;
    let (who, inside) = match program {
        "docker" | "nerdctl" | "podman" | "crictl" | "ctr" => {
            ("the container runtime's service starts the program", "the container's command")
        }
        "srun" | "sbatch" | "salloc" => {
            ("Slurm's daemon starts the tasks on their nodes", "the task")
        }
        "ray"
            if words
                .get(1..)
                .is_some_and(|rest| rest.iter().any(|w| *w == "submit" || *w == "start")) =>
        {
            ("Ray's workers run in processes of their own", "the worker")
        }
        "kubectl" | "oc" => ("the node's kubelet starts the program", "the container's command"),
        "systemd-run" => ("systemd starts the program", "the unit's command"),
        "ssh" => ("the program runs on the other host", "the remote command"),
        _ => return None,
    };
    Some(format!(
        "`{program}` is not where the work happens: {who}, outside of this command's processes, \
         and recording it would show nothing. On the host where the program runs, either record \
         the host: sudo vramscope record -o LOG --duration 10m, or attach once it runs: \
         sudo vramscope attach PID -o LOG, or put `vramscope run -o LOG --` in front of {inside}."
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(command: &str) -> Vec<OsString> {
        command.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn work_elsewhere_is_recognised() {
        for command in
            ["docker run x", "/usr/bin/srun -n 8 python t.py", "ray job submit -- x", "ssh h x"]
        {
            let hint = hint(&words(command)).unwrap();
            assert!(hint.contains("vramscope record"), "{hint}");
        }
    }

    #[test]
    fn ordinary_programs_run() {
        for command in ["python docker.py", "torchrun t.py", "ray.py submit", "mpirun -n 2 t"] {
            assert_eq!(hint(&words(command)), None, "{command}");
        }
    }
}
