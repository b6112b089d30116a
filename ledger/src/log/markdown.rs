//! The tables in Markdown, for `docs/event-log.md` and `vramscope schema`.

use super::schema::{Column, TABLES, Table};

/// Every table with its columns, as a section of Markdown.
pub fn markdown() -> String {
    TABLES.iter().map(|table| table_markdown(table)).collect()
}

fn table_markdown(table: &Table) -> String {
    let (name, doc) = (table.name, table.doc.trim());
    let columns: String = table.columns().map(column_markdown).collect();
    format!("### `{name}`\n\n{doc}\n\n| column | type | meaning |\n|---|---|---|\n{columns}\n")
}

fn column_markdown(column: &Column) -> String {
    let (name, ty) = (column.name, column.ty.as_str());
    let nullable = if column.nullable { " ?" } else { "" };
    let meaning = column.doc.trim().replace('|', "\\|");
    format!("| `{name}` | {ty}{nullable} | {meaning} |\n")
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
