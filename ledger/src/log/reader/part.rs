//! Reading one file of a log, batch by batch.

use std::{path::PathBuf, sync::Arc};

use arrow::{
    array::RecordBatch,
    datatypes::{DataType, Field, Schema, SchemaRef},
};
use parquet::arrow::{
    ProjectionMask,
    arrow_reader::{
        ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader,
        ParquetRecordBatchReaderBuilder,
    },
};

use super::{
    decode::BatchRows,
    scan::{Part, Source, footer, open},
};
use crate::log::{
    ColumnType, Row, Table,
    error::{LogError, Result, guard},
    journal::JournalBatches,
};

/// Rows of a batch when one file is read at a time.
pub(super) const BATCH_ROWS: usize = 8_192;

/// Which columns of a file to decode, and how.
#[derive(Clone, Copy, Debug)]
pub(super) enum Columns {
    /// All, as they are in the file.
    All,
    /// Those that the row type has; words as dictionaries, so that each is made once.
    OfRow(&'static Table),
    /// One column.
    One(&'static str),
}

impl Columns {
    fn wants(self, name: &str) -> bool {
        match self {
            Self::All => true,
            Self::OfRow(table) => table.fields.iter().any(|column| column.name == name),
            Self::One(one) => one == name,
        }
    }

    /// The file's schema with words as dictionaries.
    fn schema(self, file: &SchemaRef) -> Option<SchemaRef> {
        let Self::OfRow(table) = self else { return None };
        let is_word = |field: &Field| {
            let mut columns = table.fields.iter();
            *field.data_type() == DataType::Utf8
                && columns.any(|c| c.name == field.name() && c.ty == ColumnType::Word)
        };
        let fields = file.fields().iter().map(|field| {
            if is_word(field) {
                let words = DataType::Dictionary(DataType::Int32.into(), DataType::Utf8.into());
                Arc::new(field.as_ref().clone().with_data_type(words))
            } else {
                Arc::clone(field)
            }
        });
        Some(Arc::new(Schema::new(fields.collect::<Vec<_>>())))
    }
}

/// Batches of one file.
pub(super) struct PartBatches {
    path: PathBuf,
    inner: Inner,
}

enum Inner {
    Sealed(ParquetRecordBatchReader),
    Journal(JournalBatches),
    End,
}

impl PartBatches {
    pub(super) fn open(part: &Part, columns: Columns, batch_rows: usize) -> Result<Self> {
        let inner = match &part.source {
            Source::Journal(journal) => journal.batches()?.map_or(Inner::End, Inner::Journal),
            Source::Sealed => Inner::Sealed(open_sealed(part, columns, batch_rows)?),
        };
        Ok(Self { path: part.path.clone(), inner })
    }
}

impl Part {
    /// The columns that the file has; those of `table` for a journal that is not begun.
    pub(super) fn schema(&self, table: &Table) -> Result<SchemaRef> {
        match &self.source {
            Source::Sealed => Ok(Arc::clone(footer(&open(&self.path)?, &self.path)?.schema())),
            Source::Journal(journal) => {
                let batches = journal.batches()?;
                Ok(batches.map_or_else(|| table.arrow_schema(), |batches| batches.schema()))
            }
        }
    }
}

fn open_sealed(
    part: &Part,
    columns: Columns,
    batch_rows: usize,
) -> Result<ParquetRecordBatchReader> {
    let path = &part.path;
    let file = open(path)?;
    let mut metadata = footer(&file, path)?;
    guard(path, || {
        let failed = |e| LogError::parquet("read", path, e);
        if let Some(schema) = columns.schema(metadata.schema()) {
            let options = ArrowReaderOptions::new().with_schema(schema);
            let footer = Arc::clone(metadata.metadata());
            metadata = ArrowReaderMetadata::try_new(footer, options).map_err(failed)?;
        }
        let fields = metadata.schema().fields().iter().enumerate();
        let wanted: Vec<usize> =
            fields.filter(|(_, field)| columns.wants(field.name())).map(|(i, _)| i).collect();
        let mask = ProjectionMask::roots(metadata.parquet_schema(), wanted);
        ParquetRecordBatchReaderBuilder::new_with_metadata(file, metadata)
            .with_projection(mask)
            .with_batch_size(batch_rows)
            .build()
            .map_err(failed)
    })
}

impl Iterator for PartBatches {
    type Item = Result<RecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = match &mut self.inner {
            Inner::End => return None,
            Inner::Journal(batches) => batches.next().transpose(),
            Inner::Sealed(reader) => guard(&self.path, || {
                reader.next().transpose().map_err(|e| LogError::arrow("read", &self.path, e))
            }),
        };
        // After an error the rest of the file is not to be trusted.
        if !matches!(next, Ok(Some(_))) {
            self.inner = Inner::End;
        }
        next.transpose()
    }
}

/// Rows of one file.
pub(super) struct PartRows<R> {
    batches: PartBatches,
    rows: Option<BatchRows<R>>,
}

impl<R: Row> PartRows<R> {
    pub(super) fn open(part: &Part, batch_rows: usize) -> Result<Self> {
        let batches = PartBatches::open(part, Columns::OfRow(R::TABLE), batch_rows)?;
        Ok(Self { batches, rows: None })
    }
}

impl<R: Row> Iterator for PartRows<R> {
    type Item = Result<R>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(row) = self.rows.as_mut().and_then(Iterator::next) {
                return Some(Ok(row));
            }
            let batch = self.batches.next()?;
            match batch.and_then(|batch| BatchRows::new(&batch, &self.batches.path)) {
                Ok(rows) => self.rows = Some(rows),
                Err(e) => {
                    self.rows = None;
                    self.batches.inner = Inner::End;
                    return Some(Err(e));
                }
            }
        }
    }
}
