//! The `table!` macro: a row type and its table's schema from one declaration.

/// Declares a row type together with its table's name, columns and meanings.
macro_rules! table {
    ($(#[doc = $table_doc:literal])* $row:ident, $name:literal {
        $($(#[doc = $doc:literal])* $field:ident: $ty:ty,)*
    }) => {
        $(#[doc = $table_doc])*
        #[derive(Clone, Debug, PartialEq, Default)]
        pub struct $row {
            $($(#[doc = $doc])* pub $field: $ty,)*
        }
    };
}
pub(crate) use table;
