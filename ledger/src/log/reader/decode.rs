//! Batches of a file into rows: columns are found by name, and their types are checked.

use std::{marker::PhantomData, path::Path, sync::Arc};

use arrow::{
    array::{Array, ArrayRef, AsArray, RecordBatch},
    compute::cast,
    datatypes::{DataType, Int32Type, Int64Type},
};

use crate::log::{
    Cell, Column, ColumnType, Row,
    cell::intern,
    error::{LogError, Result},
};

/// Rows of one batch.
#[derive(Debug)]
pub struct BatchRows<R> {
    cells: Vec<Cell>,
    next: usize,
    rows: usize,
    row_type: PhantomData<R>,
}

impl<R: Row> BatchRows<R> {
    /// Finds the columns of `R` in a batch of the file at `path`. Columns that the file does not
    /// have are NULL where they may be; columns that `R` does not have are ignored.
    ///
    /// # Errors
    ///
    /// A column is missing, has another type, or has NULLs that must not be there.
    pub fn new(batch: &RecordBatch, path: &Path) -> Result<Self> {
        let bind = |column| {
            bind(batch.column_by_name(Column::name(column)), column)
                .map_err(|problem| Self::error(path, column, problem))
        };
        let cells = R::TABLE.fields.iter().map(bind).collect::<Result<_>>()?;
        Ok(Self { cells, next: 0, rows: batch.num_rows(), row_type: PhantomData })
    }

    fn error(path: &Path, column: &'static Column, problem: String) -> LogError {
        let (path, table) = (path.to_owned(), R::TABLE.name);
        LogError::Column { path, table, column: column.name, problem }
    }
}

impl<R: Row> Iterator for BatchRows<R> {
    type Item = R;

    fn next(&mut self) -> Option<R> {
        if self.next >= self.rows {
            return None;
        }
        self.next += 1;
        Some(R::read(&self.cells, self.next - 1))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.rows - self.next, Some(self.rows - self.next))
    }
}

impl Column {
    fn name(&self) -> &'static str {
        self.name
    }
}

fn bind(array: Option<&ArrayRef>, column: &Column) -> Result<Cell, String> {
    let Some(array) = array else {
        return if column.nullable {
            Ok(Cell::Missing)
        } else {
            Err("the file has no such column".to_owned())
        };
    };
    if !column.nullable && array.logical_null_count() > 0 {
        return Err("it has NULLs, which it must not".to_owned());
    }
    let wrong = || format!("expected {}, found {}", column.ty.as_str(), array.data_type());
    cell(array, column.ty).ok_or_else(wrong)
}

fn cell(array: &ArrayRef, ty: ColumnType) -> Option<Cell> {
    Some(match ty {
        ColumnType::I64 => Cell::I64(array.as_primitive_opt::<Int64Type>()?.clone()),
        ColumnType::I32 => Cell::I32(array.as_primitive_opt::<Int32Type>()?.clone()),
        ColumnType::Bool => Cell::Bool(array.as_boolean_opt()?.clone()),
        ColumnType::Word => match words(array) {
            Some(words) => words,
            None => text(array)?,
        },
        ColumnType::Utf8 => text(array)?,
        ColumnType::I64List => list(array)?,
        ColumnType::Micros => return None,
    })
}

/// Text however a file holds it; other writers prefer other layouts of the same text.
fn text(array: &ArrayRef) -> Option<Cell> {
    let is_text = match array.data_type() {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => true,
        DataType::Dictionary(_, values) => **values == DataType::Utf8,
        _ => false,
    };
    let plain = is_text.then(|| cast(array, &DataType::Utf8).ok())??;
    Some(Cell::Utf8(plain.as_string_opt::<i32>()?.clone()))
}

/// Text in a dictionary: its values are made once.
fn words(array: &ArrayRef) -> Option<Cell> {
    let dictionary = array.as_dictionary_opt::<Int32Type>()?;
    let values = dictionary.values().as_string_opt::<i32>()?;
    let words = values.iter().map(|value| intern(value.unwrap_or_default())).collect();
    Some(Cell::Words(dictionary.keys().clone(), words))
}

fn list(array: &ArrayRef) -> Option<Cell> {
    let plain = match array.data_type() {
        DataType::List(_) => Arc::clone(array),
        DataType::LargeList(_) => cast(array, &ColumnType::I64List.arrow()).ok()?,
        _ => return None,
    };
    let list = plain.as_list_opt::<i32>()?;
    let items = list.values().as_primitive_opt::<Int64Type>()?;
    (items.null_count() == 0).then(|| Cell::I64List(list.clone()))
}

#[cfg(test)]
mod tests {
    use arrow::array::{Int32Array, Int64Array, StringArray, StringViewArray};

    use super::*;
    use crate::{log::BatchBuilder, rows::LossRow};

    fn batch() -> RecordBatch {
        let mut builder = BatchBuilder::new(LossRow::TABLE);
        builder.append(&LossRow { reason: "ring_full".into(), count: 3, ..Default::default() });
        builder.finish().unwrap()
    }

    /// The batch with one column replaced, or left out.
    fn with(name: &str, array: Option<&ArrayRef>) -> RecordBatch {
        let batch = batch();
        let schema = batch.schema();
        let mut columns: Vec<(String, ArrayRef)> = Vec::new();
        for (field, column) in schema.fields().iter().zip(batch.columns()) {
            let replaced = if field.name() == name { array } else { Some(column) };
            columns.extend(replaced.map(|column| (field.name().clone(), Arc::clone(column))));
        }
        RecordBatch::try_from_iter_with_nullable(
            columns.into_iter().map(|(name, column)| (name, column, true)),
        )
        .unwrap()
    }

    fn error(batch: &RecordBatch) -> String {
        BatchRows::<LossRow>::new(batch, Path::new("x.parquet")).unwrap_err().to_string()
    }

    #[test]
    fn a_wrong_type_names_file_table_and_column() {
        let wrong: ArrayRef = Arc::new(Int32Array::from(vec![1]));
        let message = error(&with("count", Some(&wrong)));
        assert!(message.starts_with("x.parquet: table losses, column count:"), "{message}");
        assert!(message.contains("expected i64, found Int32"), "{message}");
    }

    #[test]
    fn a_missing_or_null_column_is_an_error_only_where_null_is_not_allowed() {
        assert!(error(&with("count", None)).contains("no such column"));
        let null: ArrayRef = Arc::new(Int64Array::from(vec![None]));
        assert!(error(&with("count", Some(&null))).contains("NULLs"));
        let batch = with("bytes", None);
        let rows: Vec<_> = BatchRows::<LossRow>::new(&batch, Path::new("x")).unwrap().collect();
        assert_eq!((rows[0].bytes, rows[0].count), (None, 3));
    }

    #[test]
    fn text_is_text_in_every_layout() {
        let dictionary = cast(
            &StringArray::from(vec!["gone"]),
            &DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8)),
        );
        for text in [Arc::new(StringViewArray::from(vec!["gone"])) as ArrayRef, dictionary.unwrap()]
        {
            let batch = with("reason", Some(&text));
            let mut rows = BatchRows::<LossRow>::new(&batch, Path::new("x")).unwrap();
            assert_eq!(rows.next().unwrap().reason, "gone");
        }
    }
}
