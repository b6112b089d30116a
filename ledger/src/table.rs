//! The `table!` macro: a row type and its table's schema from one declaration.

/// Declares a row type together with its table's name, columns and meanings.
///
/// The struct, the [`Table`](crate::log::Table) that describes it, and the code that appends rows
/// to column builders and reads them back all come from the one list of fields, so that they
/// cannot disagree. `crate::log::TableIndex` must list the row type.
macro_rules! table {
    ($(#[doc = $table_doc:literal])* $row:ident, $name:literal {
        $($(#[doc = $doc:literal])* $field:ident: $ty:ty,)*
    }) => {
        $(#[doc = $table_doc])*
        #[allow(clippy::doc_markdown, reason = "the same texts are shown by `vramscope schema`")]
        #[derive(Clone, Debug, PartialEq, Default)]
        pub struct $row {
            $($(#[doc = $doc])* pub $field: $ty,)*
        }

        impl crate::log::Row for $row {
            const TABLE: &'static crate::log::Table = &crate::log::Table {
                name: $name,
                doc: concat!($($table_doc),*),
                fields: &[$(crate::log::Column {
                    name: stringify!($field),
                    ty: <$ty as crate::log::Field>::TYPE,
                    nullable: <$ty as crate::log::Field>::NULLABLE,
                    doc: concat!($($doc),*),
                },)*],
            };
            const INDEX: usize = crate::log::TableIndex::$row as usize;

            fn append(&self, columns: &mut [crate::log::ColumnBuilder]) {
                let mut columns = columns.iter_mut();
                $(if let Some(column) = columns.next() {
                    crate::log::Field::append(&self.$field, column);
                })*
            }

            fn read(cells: &[crate::log::Cell], row: usize) -> Self {
                let mut cells = cells.iter();
                Self { $($field: crate::log::Field::read(cells.next(), row),)* }
            }
        }
    };
}
pub(crate) use table;
