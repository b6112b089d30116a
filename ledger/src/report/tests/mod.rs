//! Reports from hand-built rows.
