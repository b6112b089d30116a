//! Reports of made-up hosts.

mod findings;
mod from_log;
mod golden;
mod jobs;
mod leaks;
mod scene;
mod schema;
