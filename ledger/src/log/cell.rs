//! Columns into fields: what the `table!` macro's `read` takes its values from.

use std::{
    borrow::Cow,
    collections::HashSet,
    sync::{LazyLock, PoisonError, RwLock},
};

use arrow::array::{Array, AsArray, BooleanArray, Int32Array, Int64Array, ListArray, StringArray};
use arrow::datatypes::Int64Type;

use super::{build::ColumnBuilder, schema::ColumnType};

/// One column of a batch, its type settled once a batch instead of once a value.
#[derive(Clone, Debug)]
pub enum Cell {
    /// The file has no such column, and NULL may stand for it.
    Missing,
    /// `i64`.
    I64(Int64Array),
    /// `i32`.
    I32(Int32Array),
    /// `bool`.
    Bool(BooleanArray),
    /// Text.
    Utf8(StringArray),
    /// Text with few distinct values, each made once a batch.
    Words(Int32Array, Vec<Cow<'static, str>>),
    /// Lists of `i64`.
    I64List(ListArray),
}

impl Cell {
    /// Whether the value is known.
    fn is_known(&self, row: usize) -> bool {
        match self {
            Self::Missing => false,
            Self::I64(array) => array.is_valid(row),
            Self::I32(array) | Self::Words(array, _) => array.is_valid(row),
            Self::Bool(array) => array.is_valid(row),
            Self::Utf8(array) => array.is_valid(row),
            Self::I64List(array) => array.is_valid(row),
        }
    }
}

/// A Rust type that a field of a row can have.
///
/// `append` and `read` meet only builders and cells of [`Field::TYPE`]: both are made from the
/// table that names it. The other arms are never reached and yield nothing.
pub trait Field: Sized {
    /// Type of the column.
    const TYPE: ColumnType;
    /// NULL is allowed.
    const NULLABLE: bool = false;
    /// Appends the value.
    fn append(&self, column: &mut ColumnBuilder);
    /// Reads the value of row number `row`.
    fn read(cell: Option<&Cell>, row: usize) -> Self;
}

/// Implements [`Field`] for a type that Arrow holds as it is.
macro_rules! plain_field {
    ($ty:ty, $variant:ident) => {
        impl Field for $ty {
            const TYPE: ColumnType = ColumnType::$variant;

            fn append(&self, column: &mut ColumnBuilder) {
                if let ColumnBuilder::$variant(builder) = column {
                    builder.append_value(*self);
                }
            }

            fn read(cell: Option<&Cell>, row: usize) -> Self {
                match cell {
                    Some(Cell::$variant(array)) => array.value(row),
                    _ => Self::default(),
                }
            }
        }
    };
}

plain_field!(i64, I64);
plain_field!(i32, I32);
plain_field!(bool, Bool);

fn append_str(value: &str, column: &mut ColumnBuilder) {
    if let ColumnBuilder::Utf8(builder) = column {
        builder.append_value(value);
    }
}

/// The word that `key` stands for; dictionary keys are checked when the file is decoded.
fn word<'a>(
    keys: &Int32Array,
    words: &'a [Cow<'static, str>],
    row: usize,
) -> &'a Cow<'static, str> {
    static NONE: Cow<'static, str> = Cow::Borrowed("");
    usize::try_from(keys.value(row)).ok().and_then(|key| words.get(key)).unwrap_or(&NONE)
}

impl Field for String {
    const TYPE: ColumnType = ColumnType::Utf8;

    fn append(&self, column: &mut ColumnBuilder) {
        append_str(self, column);
    }

    fn read(cell: Option<&Cell>, row: usize) -> Self {
        match cell {
            Some(Cell::Utf8(array)) => array.value(row).to_owned(),
            Some(Cell::Words(keys, words)) => word(keys, words, row).clone().into_owned(),
            _ => Self::new(),
        }
    }
}

impl Field for Cow<'static, str> {
    const TYPE: ColumnType = ColumnType::Word;

    fn append(&self, column: &mut ColumnBuilder) {
        append_str(self, column);
    }

    fn read(cell: Option<&Cell>, row: usize) -> Self {
        match cell {
            Some(Cell::Utf8(array)) => intern(array.value(row)),
            Some(Cell::Words(keys, words)) => word(keys, words, row).clone(),
            _ => Self::Borrowed(""),
        }
    }
}

impl Field for Vec<i64> {
    const TYPE: ColumnType = ColumnType::I64List;

    fn append(&self, column: &mut ColumnBuilder) {
        if let ColumnBuilder::I64List(builder) = column {
            builder.values().append_slice(self);
            builder.append(true);
        }
    }

    fn read(cell: Option<&Cell>, row: usize) -> Self {
        match cell {
            Some(Cell::I64List(array)) => {
                array.value(row).as_primitive::<Int64Type>().values().to_vec()
            }
            _ => Self::new(),
        }
    }
}

impl<T: Field> Field for Option<T> {
    const TYPE: ColumnType = T::TYPE;
    const NULLABLE: bool = true;

    fn append(&self, column: &mut ColumnBuilder) {
        match self {
            Some(value) => value.append(column),
            None => column.append_null(),
        }
    }

    fn read(cell: Option<&Cell>, row: usize) -> Self {
        cell.filter(|cell| cell.is_known(row)).map(|_| T::read(cell, row))
    }
}

/// Words kept for the life of the program; names of functions, levels and devices fit many times.
const MAX_WORDS: usize = 4_096;
/// Longest word kept.
const MAX_WORD_BYTES: usize = 128;

/// The text as a word that costs nothing to copy, as long as words are few and short: a hostile
/// file can make the table of kept words grow to half a MiB and no further.
pub(crate) fn intern(text: &str) -> Cow<'static, str> {
    static WORDS: LazyLock<RwLock<HashSet<&'static str>>> = LazyLock::new(RwLock::default);
    if text.is_empty() {
        return Cow::Borrowed("");
    }
    if let Some(word) = WORDS.read().unwrap_or_else(PoisonError::into_inner).get(text) {
        return Cow::Borrowed(word);
    }
    keep(&mut WORDS.write().unwrap_or_else(PoisonError::into_inner), text)
}

fn keep(words: &mut HashSet<&'static str>, text: &str) -> Cow<'static, str> {
    if words.len() >= MAX_WORDS || text.len() > MAX_WORD_BYTES {
        return Cow::Owned(text.to_owned());
    }
    // Another thread may have been first; then its copy is the one to use.
    if let Some(word) = words.get(text) {
        return Cow::Borrowed(word);
    }
    let word: &'static str = Box::leak(text.into());
    words.insert(word);
    Cow::Borrowed(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_kept_once_and_within_bounds() {
        let (first, second) = (intern("cuMemAlloc_v2"), intern("cuMemAlloc_v2"));
        let (Cow::Borrowed(first), Cow::Borrowed(second)) = (first, second) else {
            panic!("short words are kept");
        };
        assert!(std::ptr::eq(first, second));
        assert!(matches!(intern(&"x".repeat(MAX_WORD_BYTES + 1)), Cow::Owned(_)));
        for number in 0..MAX_WORDS * 2 {
            intern(&format!("word {number}"));
        }
        assert!(matches!(intern("one too many"), Cow::Owned(_)));
    }
}
