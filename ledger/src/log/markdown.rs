//! The tables in Markdown, for `docs/event-log.md` and `vramscope schema`.

use std::fmt::Write;

use super::schema::{TABLES, Table};

/// Every table with its columns, as a section of Markdown.
pub fn markdown() -> String {
    TABLES.iter().fold(String::new(), |mut text, table| {
        table_markdown(&mut text, table);
        text
    })
}

fn table_markdown(text: &mut String, table: &Table) {
    // Writing to a String cannot fail.
    let _: std::fmt::Result = write!(
        text,
        "### `{}`\n\n{}\n\n| column | type | meaning |\n|---|---|---|\n",
        table.name,
        table.doc.trim()
    );
    for column in table.columns() {
        let nullable = if column.nullable { " ?" } else { "" };
        let meaning = column.doc.trim().replace('|', "\\|");
        let _: std::fmt::Result =
            writeln!(text, "| `{}` | {}{nullable} | {meaning} |", column.name, column.ty.as_str());
    }
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGIN: &str = "<!-- tables: begin -->\n\n";
    const END: &str = "<!-- tables: end -->";

    /// `BLESS=1 cargo test -p ledger` rewrites the section.
    #[test]
    fn the_document_lists_every_table_and_column() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/event-log.md");
        let document = std::fs::read_to_string(path).unwrap();
        let (head, rest) = document.split_once(BEGIN).expect("begin mark");
        let (tables, tail) = rest.split_once(END).expect("end mark");
        if std::env::var_os("BLESS").is_some() {
            std::fs::write(path, format!("{head}{BEGIN}{}{END}{tail}", markdown())).unwrap();
        } else {
            assert_eq!(tables, markdown(), "run BLESS=1 cargo test -p ledger markdown");
        }
    }
}
