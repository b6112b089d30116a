//! Reports of made-up hosts.

mod contexts;
mod damage;
mod findings;
mod from_log;
mod golden;
mod jobs;
mod leaks;
mod lists;
mod sampled;
mod scene;
mod schema;
mod short_runs;
