//! Reports of made-up hosts.

mod findings;
mod from_log;
mod golden;
mod scene;
mod schema;
