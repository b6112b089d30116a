//! Ranks that processes tell NCCL, where their environment says none.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

use std::collections::BTreeSet;

use agent_tests::{
    agent::Agent,
    logs::Logged,
    machine,
    sim::{Running, SimDevice, truth},
    wait::eventually,
};
use ledger::rows::{AnnotationRow, OomRow, ProcessRow};

type Rank = (Option<i32>, Option<i32>, Option<String>);

fn rank_of(row: &ProcessRow) -> Rank {
    (row.rank, row.world_size, row.job.clone())
}

/// A new communicator's id.
fn new_id(device: &SimDevice) -> String {
    let mut program = device.start("ranks", &[]).unwrap();
    program.until_ready().unwrap();
    let lines = program.step("id").unwrap();
    truth::line(&lines, "ID").unwrap().strip_prefix("ID ").unwrap().to_owned()
}

/// A process with these variables in its environment, at its first `READY`.
fn process(device: &SimDevice, env: &[(&str, &str)]) -> Running {
    let mut command = device.program("ranks");
    command.envs(env.iter().copied());
    let mut running = Running::start(command).unwrap();
    running.until_ready().unwrap();
    running
}

fn join(running: &mut Running, order: &str) {
    let lines = running.step(order).unwrap();
    assert!(lines.contains(&"JOINED rc=0".to_owned()), "{order}: {lines:?}");
}

#[test]
fn ranks_of_one_communicator_are_one_job() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let id = new_id(&device);
    let mut ranks: Vec<Running> = (0..3).map(|_| process(&device, &[])).collect();
    let pids: Vec<u32> = ranks.iter().map(Running::pid).collect();
    let recording = Agent::new(&device).attach(&pids).unwrap();
    for (rank, how) in ["init", "config", "scalable"].iter().enumerate() {
        join(&mut ranks[rank], &format!("{how} {id} 3 {rank}"));
    }
    drop(ranks);
    let recorded = recording.wait().unwrap();
    let logged = recorded.open().unwrap();
    let said: Vec<Rank> = pids.iter().map(|pid| rank_of(&logged.process(*pid).unwrap())).collect();
    let job = said[0].2.clone().unwrap();
    assert!(job.starts_with("nccl-") && job.len() == 21, "{job}");
    for (rank, said) in (0..).zip(said) {
        assert_eq!(said, (Some(rank), Some(3), Some(job.clone())));
    }
    assert_eq!(logged.losses().unwrap(), [].into(), "{}", recorded.said);
}

#[test]
fn what_the_environment_says_wins() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let id = new_id(&device);
    let launched = [("RANK", "5"), ("WORLD_SIZE", "9")];
    let mut named = process(&device, &[&launched[..], &[("TORCHELASTIC_RUN_ID", "abc")]].concat());
    // torchrun's default names nothing.
    let mut nameless =
        process(&device, &[&launched[..], &[("TORCHELASTIC_RUN_ID", "none")]].concat());
    let pids = [named.pid(), nameless.pid()];
    let recording = Agent::new(&device).attach(&pids).unwrap();
    join(&mut named, &format!("init {id} 2 0"));
    join(&mut nameless, &format!("init {id} 2 1"));
    drop((named, nameless));
    let logged = recording.wait().unwrap().open().unwrap();
    let [named, nameless] = pids.map(|pid| rank_of(&logged.process(pid).unwrap()));
    assert_eq!(named, (Some(5), Some(9), Some("abc".to_owned())));
    assert_eq!((nameless.0, nameless.1), (Some(5), Some(9)));
    assert!(nameless.2.is_some_and(|job| job.starts_with("nccl-")));
}

#[test]
fn the_largest_communicator_of_a_program_tells_its_rank() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let ids: Vec<String> = (0..3).map(|_| new_id(&device)).collect();
    let mut program = Agent::new(&device).start("ranks", &[]).unwrap();
    program.until_ready().unwrap();
    // In a real program seconds lie between the loading of NCCL and its first communicator.
    eventually("NCCL is probed", || {
        let rows = Logged::open(program.log()).and_then(|logged| logged.rows::<AnnotationRow>());
        rows.is_ok_and(|rows| {
            rows.iter().any(|row| row.kind == "attach" && row.text.contains("libnccl"))
        })
    });
    for (order, rc) in [
        (format!("init {} 1 0", ids[0]), 0),   // alone
        (format!("init {} 9 9", ids[0]), 4),   // refused
        (format!("config {} 2 1", ids[0]), 0), // a group
        (format!("init {} 4 3", ids[1]), 0),   // all
        (format!("init {} 4 2", ids[2]), 0),   // all once more
        (format!("init {} 2 0", ids[2]), 0),   // a group
    ] {
        let lines = program.step(&order).unwrap();
        assert!(lines.contains(&format!("JOINED rc={rc}")), "{order}: {lines:?}");
    }
    // NCCL's call comes before the `cuInit` that it makes, and is none of the driver's.
    eventually("it is said to be seen from its start, with its rank", || {
        let rows = Logged::open(program.log()).and_then(|logged| logged.rows::<ProcessRow>());
        rows.is_ok_and(|rows| rows.iter().any(|row| row.rank == Some(3) && row.from_start))
    });
    program.step("exec").unwrap();
    let recorded = program.finish().unwrap();
    let logged = recorded.open().unwrap();
    assert_eq!(logged.losses().unwrap(), [].into());

    let rows = logged.rows::<ProcessRow>().unwrap();
    let mut said: Vec<_> = rows.iter().map(|row| (row.rank, row.world_size)).collect();
    said.dedup();
    let (none, group, all) = ((None, None), (Some(1), Some(2)), (Some(3), Some(4)));
    assert_eq!(said, [none, group, all, none], "the last one is another program");
    let jobs: BTreeSet<_> = rows.iter().map(|row| row.job.as_ref()).collect();
    assert_eq!(jobs.len(), 3, "{jobs:?}");

    // Communicators are none of the account's: what they take is.
    let events = logged.events().unwrap();
    assert!(events.iter().all(|event| !event.api.contains("nccl")));
    let buffers = events.iter().filter(|event| event.op == "alloc" && event.level == "device");
    assert_eq!(buffers.count(), 5);
    assert_eq!(logged.rows::<OomRow>().unwrap(), []);
}
