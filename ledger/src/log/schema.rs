//! What a table is: its name, its columns with type and meaning, and the traits that tie a row
//! type to them. The `table!` macro implements [`Row`]; nothing else should.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field as ArrowField, Schema, SchemaRef, TimeUnit};

use super::{build::ColumnBuilder, cell::Cell};

/// Type of a column. Only types that pandas, `DuckDB`, Polars and Spark read alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ColumnType {
    /// Signed 64 bits.
    I64,
    /// Signed 32 bits.
    I32,
    /// True or false.
    Bool,
    /// Text.
    Utf8,
    /// Text with few distinct values; the same type in files, cheaper to read back.
    Word,
    /// A list of signed 64-bit integers.
    I64List,
    /// Microseconds since the epoch, UTC.
    Micros,
}

impl ColumnType {
    /// The name in the documentation and in `vramscope schema`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::I64 => "i64",
            Self::I32 => "i32",
            Self::Bool => "bool",
            Self::Utf8 | Self::Word => "string",
            Self::I64List => "list<i64>",
            Self::Micros => "timestamp(us, UTC)",
        }
    }

    /// The Arrow type, in journals and Parquet files alike.
    pub fn arrow(self) -> DataType {
        match self {
            Self::I64 => DataType::Int64,
            Self::I32 => DataType::Int32,
            Self::Bool => DataType::Boolean,
            Self::Utf8 | Self::Word => DataType::Utf8,
            Self::I64List => DataType::new_list(DataType::Int64, true),
            Self::Micros => DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into())),
        }
    }
}

/// One column of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    /// Name in the files.
    pub name: &'static str,
    /// Type.
    pub ty: ColumnType,
    /// NULL may stand for "unknown".
    pub nullable: bool,
    /// What it means; Markdown, as written in the source (may start with a blank).
    pub doc: &'static str,
}

/// The time for people, in front of every table that has a `ts_ns`.
const TS: Column = Column {
    name: "ts",
    ty: ColumnType::Micros,
    nullable: false,
    doc: "`ts_ns` rounded down to microseconds, for people and SQL engines.",
};

/// A table of the log, as its row type declares it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Table {
    /// Name: the directory under the log, and the first part of its file names.
    pub name: &'static str,
    /// What a row tells.
    pub doc: &'static str,
    /// Columns that the row type declares; [`Table::columns`] has the derived one too.
    pub fields: &'static [Column],
}

impl Table {
    /// Whether the table has a `ts_ns`, and so a `ts`.
    pub fn has_ts(&self) -> bool {
        self.fields.iter().any(|column| column.name == "ts_ns")
    }

    /// Every column as in the files, in their order.
    pub fn columns(&self) -> impl Iterator<Item = &'static Column> + use<> {
        self.has_ts().then_some(&TS).into_iter().chain(self.fields)
    }

    /// The Arrow schema of the table's files.
    pub fn arrow_schema(&self) -> SchemaRef {
        let fields: Vec<ArrowField> = self
            .columns()
            .map(|column| ArrowField::new(column.name, column.ty.arrow(), column.nullable))
            .collect();
        Arc::new(Schema::new(fields))
    }
}

/// A row of one of the log's tables.
pub trait Row: Sized + Clone + std::fmt::Debug + 'static {
    /// Name, columns and meanings.
    const TABLE: &'static Table;
    /// Position in [`super::TABLES`].
    const INDEX: usize;
    /// Appends each field to its builder, in the order of [`Table::fields`].
    fn append(&self, columns: &mut [ColumnBuilder]);
    /// Reads row number `row` from cells in the order of [`Table::fields`].
    fn read(cells: &[Cell], row: usize) -> Self;
}

/// Lists the row types once: the order of [`TABLES`] and of [`TableIndex`].
macro_rules! tables {
    ($($row:ident),* $(,)?) => {
        /// Position of each row type's table in [`TABLES`].
        #[allow(clippy::enum_variant_names, reason = "the variants are the row types' names")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum TableIndex { $($row),* }

        /// Every table of the log.
        pub const TABLES: &[&Table] = &[$(<crate::rows::$row as Row>::TABLE),*];
    };
}

tables! {
    EventRow, SiteUsageRow, BreakdownRow, LiveRow, DeviceSampleRow, ProcessSampleRow,
    HostSampleRow, ProcessRow, ProcessLibRow, DeviceRow, StackRow, FrameRow, OomRow,
    AnnotationRow, LossRow,
}

/// Position in [`TABLES`] of the table called `name`.
pub fn table_index(name: &str) -> Option<usize> {
    TABLES.iter().position(|table| table.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::{EventRow, FrameRow, LossRow, StackRow};

    #[test]
    fn every_row_type_finds_its_own_table() {
        assert_eq!(TABLES[EventRow::INDEX].name, "events");
        assert_eq!(TABLES[StackRow::INDEX].name, "stacks");
        assert_eq!(TABLES[LossRow::INDEX].name, "losses");
        assert_eq!(table_index("losses"), Some(TABLES.len() - 1));
        assert_eq!(table_index("passwords"), None);
    }

    #[test]
    fn only_tables_with_ts_ns_begin_with_ts() {
        let first = |table: &Table| table.columns().next().map(|column| column.name);
        assert_eq!(first(EventRow::TABLE), Some("ts"));
        assert_eq!(first(FrameRow::TABLE), Some("frame_id"));
    }

    #[test]
    fn nullable_is_what_is_optional() {
        let schema = EventRow::TABLE.arrow_schema();
        assert!(!schema.field_with_name("addr").unwrap().is_nullable());
        assert!(schema.field_with_name("size_bytes").unwrap().is_nullable());
    }

    #[test]
    fn every_column_says_what_it_means_and_date_is_no_column() {
        for table in TABLES {
            assert!(!table.doc.trim().is_empty(), "{}", table.name);
            for column in table.columns() {
                assert!(column.doc.trim().len() > 2, "{}.{}", table.name, column.name);
                assert_ne!(column.name, "date", "the partition key would hide the column");
            }
        }
    }
}
