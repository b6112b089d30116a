//! The two halves of `run` for a user who is not root: the program here, the recorder under `sudo`.

use std::{
    io::{BufRead as _, BufReader, Read as _},
    os::unix::fs::DirBuilderExt as _,
    path::Path,
    process::{Child, ChildStdin, Command, ExitCode, Stdio},
};

use anyhow::Context as _;

use super::{Waiting, code_of, follow, wait_for};
use crate::{
    cli::{Agent, Run},
    cmd::{precondition, print, session},
    live::Target,
    stop_file,
};

/// What the recorder prints when the program may start.
const READY: &str = "ready";

/// The recorder under `sudo`. It ends when its stdin is closed.
struct Recorder {
    child: Child,
    stdin: ChildStdin,
}

/// The program runs here, as the user; `sudo` starts the recorder.
pub(super) fn as_user(args: &Run, folder: &Path) -> anyhow::Result<ExitCode> {
    check_writable(folder)?;
    let waiting = Waiting::start(&args.command)?;
    let recorder = start_recorder(args, folder, waiting.pid())?;
    let status = session::runtime()?.block_on(async {
        let signals = session::Signals::new()?;
        // The recorder looks at the stop file itself.
        wait_for(waiting.go()?, signals, &mut || {}).await
    })?;
    drop(recorder.stdin);
    let mut child = recorder.child;
    child.wait().context("wait for the recorder")?;
    Ok(code_of(status))
}

/// The user's own rights decide whether the log may be there.
fn check_writable(folder: &Path) -> anyhow::Result<()> {
    // For the user alone, as the recorder would make it.
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.and_then(|()| tempfile_in(folder)).with_context(|| {
        format!("write to the log's folder {}; choose another with -o", folder.display())
    })
}

fn tempfile_in(folder: &Path) -> std::io::Result<()> {
    let probe = folder.join(format!(".probe-{}", std::process::id()));
    std::fs::File::create_new(&probe)?;
    std::fs::remove_file(probe)
}

fn start_recorder(args: &Run, folder: &Path, pid: u32) -> anyhow::Result<Recorder> {
    let itself = std::env::current_exe().context("find this program's own file")?;
    let recording = &args.recording;
    let mut sudo = Command::new("sudo");
    sudo.arg("--").arg(itself).arg("__agent").arg("--pid").arg(pid.to_string());
    sudo.arg("--output").arg(folder).args(["--detail", recording.detail.as_str()]);
    sudo.args(["--ring-size", &recording.ring_size.to_string()]);
    if let Some(bytes) = recording.max_disk {
        sudo.args(["--max-disk", &bytes.to_string()]);
    }
    if let Some(max) = recording.max_overhead {
        sudo.args(["--max-overhead", &max.to_string()]);
    }
    if recording.full_commands {
        sudo.arg("--full-commands");
    }
    if recording.risks.force {
        sudo.arg("--force");
    }
    if recording.risks.allow_return_probes {
        sudo.arg("--allow-return-probes");
    }
    if recording.no_stacks {
        sudo.arg("--no-stacks");
    }
    if recording.runtime_api {
        sudo.arg("--runtime-api");
    }
    for part in &recording.user_code {
        sudo.args(["--user-code", part]);
    }
    if let Some(folders) = std::env::var_os("LD_LIBRARY_PATH") {
        sudo.arg("--library-path").arg(folders);
    }
    let mut child = sudo.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(|error| {
        precondition(format!(
            "recording needs root, and `sudo` could not be started ({error}). As root: \
             vramscope run ... runs the program as root too; from a user's shell install sudo"
        ))
    })?;
    let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
        anyhow::bail!("the recorder has no pipes");
    };
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line).context("hear from the recorder")?;
    if line.trim() != READY {
        child.wait().context("wait for the recorder")?;
        return Err(precondition(
            "the recorder did not start (see above); the program was not run",
        ));
    }
    Ok(Recorder { child, stdin })
}

/// The recording half: attaches, says so, records until stdin closes.
pub(in crate::cmd) fn run(args: &Agent) -> anyhow::Result<ExitCode> {
    let folder = std::path::absolute(&args.recording.output).context("resolve the log's folder")?;
    let roots = [args.pid.get()];
    let mut session = session::start(&args.recording, &folder, Target::Processes, "run", &roots)?;
    follow(&session, args.pid.get(), args.library_path.as_deref())?;
    let end = session::runtime()?.block_on(async {
        // Ctrl-C at the terminal reaches this process too; the program decides when it is over.
        let _signals = session::Signals::new()?;
        print(&format!("{READY}\n"))?;
        let program = std::thread::spawn(wait_for_end);
        while !program.is_finished() {
            if stop_file::exists() {
                return anyhow::Ok(session::End::Stopped);
            }
            tokio::time::sleep(session::LOOK).await;
        }
        Ok(session::End::Asked)
    })?;
    session::end(&mut session, &folder, end)?;
    Ok(ExitCode::SUCCESS)
}

fn wait_for_end() {
    let mut rest = Vec::new();
    // An error means the other side is gone as well.
    std::io::stdin().lock().read_to_end(&mut rest).unwrap_or_default();
}
