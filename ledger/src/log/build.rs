//! Rows into columns: what the `table!` macro's `append` writes to.

use std::{fmt, sync::Arc};

use arrow::{
    array::{
        Array, ArrayRef, BooleanBuilder, Int32Builder, Int64Array, Int64Builder, ListBuilder,
        RecordBatch, RecordBatchOptions, StringBuilder, TimestampMicrosecondArray,
    },
    datatypes::SchemaRef,
    error::ArrowError,
};

use super::schema::{ColumnType, Row, Table};

/// Collects one column.
#[derive(Debug)]
pub enum ColumnBuilder {
    /// For `i64`.
    I64(Int64Builder),
    /// For `i32`.
    I32(Int32Builder),
    /// For `bool`.
    Bool(BooleanBuilder),
    /// For text.
    Utf8(StringBuilder),
    /// For lists of `i64`.
    I64List(ListBuilder<Int64Builder>),
}

impl ColumnBuilder {
    fn new(ty: ColumnType) -> Self {
        match ty {
            ColumnType::I64 | ColumnType::Micros => Self::I64(Int64Builder::new()),
            ColumnType::I32 => Self::I32(Int32Builder::new()),
            ColumnType::Bool => Self::Bool(BooleanBuilder::new()),
            ColumnType::Utf8 | ColumnType::Word => Self::Utf8(StringBuilder::new()),
            ColumnType::I64List => Self::I64List(ListBuilder::new(Int64Builder::new())),
        }
    }

    /// Appends NULL.
    pub fn append_null(&mut self) {
        match self {
            Self::I64(builder) => builder.append_null(),
            Self::I32(builder) => builder.append_null(),
            Self::Bool(builder) => builder.append_null(),
            Self::Utf8(builder) => builder.append_null(),
            Self::I64List(builder) => builder.append_null(),
        }
    }

    fn finish(&mut self) -> ArrayRef {
        match self {
            Self::I64(builder) => Arc::new(builder.finish()),
            Self::I32(builder) => Arc::new(builder.finish()),
            Self::Bool(builder) => Arc::new(builder.finish()),
            Self::Utf8(builder) => Arc::new(builder.finish()),
            Self::I64List(builder) => Arc::new(builder.finish()),
        }
    }
}

/// Collects rows of one table until they become a batch.
pub struct BatchBuilder {
    schema: SchemaRef,
    /// Position of `ts_ns` among the declared fields.
    ts_ns: Option<usize>,
    columns: Vec<ColumnBuilder>,
    rows: usize,
}

impl fmt::Debug for BatchBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchBuilder").field("rows", &self.rows).finish_non_exhaustive()
    }
}

impl BatchBuilder {
    /// An empty builder for `table`.
    pub fn new(table: &Table) -> Self {
        Self {
            schema: table.arrow_schema(),
            ts_ns: table.fields.iter().position(|column| column.name == "ts_ns"),
            columns: table.fields.iter().map(|column| ColumnBuilder::new(column.ty)).collect(),
            rows: 0,
        }
    }

    /// Appends a row, which must be of the table that the builder was made for.
    pub fn append<R: Row>(&mut self, row: &R) {
        row.append(&mut self.columns);
        self.rows += 1;
    }

    /// Rows appended since the last [`BatchBuilder::finish`].
    pub fn len(&self) -> usize {
        self.rows
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// The schema of the batches.
    pub fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// Turns what was collected into a batch, `ts` included, and starts over.
    ///
    /// # Errors
    ///
    /// Rows of another table were appended: the columns do not fit the schema.
    pub fn finish(&mut self) -> Result<RecordBatch, ArrowError> {
        let mut arrays: Vec<ArrayRef> =
            self.columns.iter_mut().map(ColumnBuilder::finish).collect();
        if let Some(array) = self.ts_ns.and_then(|index| arrays.get(index)) {
            let micros = micros(array);
            arrays.insert(0, micros);
        }
        let options = RecordBatchOptions::new().with_row_count(Some(self.rows));
        self.rows = 0;
        RecordBatch::try_new_with_options(Arc::clone(&self.schema), arrays, &options)
    }
}

/// `ts` from `ts_ns`, rounded down, before the epoch too.
fn micros(ts_ns: &ArrayRef) -> ArrayRef {
    let nanos = ts_ns.as_any().downcast_ref::<Int64Array>();
    let micros = nanos.into_iter().flat_map(|array| array.values().iter());
    let micros = micros.map(|nanos| nanos.div_euclid(1_000));
    Arc::new(TimestampMicrosecondArray::from_iter_values(micros).with_timezone("UTC"))
}

#[cfg(test)]
mod tests {
    use arrow::array::AsArray;
    use arrow::datatypes::TimestampMicrosecondType;

    use super::*;
    use crate::rows::{AnnotationRow, FrameRow};

    #[test]
    fn ts_is_ts_ns_rounded_down() {
        let mut builder = BatchBuilder::new(AnnotationRow::TABLE);
        for ts_ns in [1_999, -1, i64::MAX] {
            builder.append(&AnnotationRow { ts_ns, ..Default::default() });
        }
        let batch = builder.finish().unwrap();
        let ts = batch.column(0).as_primitive::<TimestampMicrosecondType>();
        assert_eq!(ts.values(), &[1, -1, i64::MAX / 1_000]);
    }

    #[test]
    fn rows_of_another_table_are_an_error_not_a_file() {
        let mut builder = BatchBuilder::new(AnnotationRow::TABLE);
        builder.append(&FrameRow::default());
        assert!(builder.finish().is_err());
    }

    #[test]
    fn an_empty_batch_has_all_columns() {
        let mut builder = BatchBuilder::new(FrameRow::TABLE);
        assert_eq!(builder.finish().unwrap().num_columns(), FrameRow::TABLE.fields.len());
    }
}
