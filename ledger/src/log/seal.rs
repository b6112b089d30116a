//! Parquet files: written in `staging/`, moved into their table when finished.

use std::{fs::File, path::PathBuf};

use arrow::array::RecordBatch;
use parquet::{
    arrow::ArrowWriter,
    basic::{Compression, Encoding, ZstdLevel},
    file::{
        metadata::KeyValue,
        properties::{WriterProperties, WriterPropertiesBuilder},
    },
    schema::types::ColumnPath,
};

use super::{
    dir::{Area, LogDir},
    error::{LogError, Result},
    manifest::Manifest,
    name::{self, FileName},
    schema::{ColumnType, TABLES, Table},
};

/// Rows of a row group: near `DuckDB`'s unit of parallelism.
const ROW_GROUP_ROWS: usize = 131_072;

/// Bytes of a row group in memory at which it is written early (long texts).
pub(super) const ROW_GROUP_BYTES: usize = 32 << 20;

/// Level of ZSTD; higher levels cost several times the CPU for a few percent.
const ZSTD_LEVEL: i32 = 3;

/// Name of the metadata key that holds the `seq` of each checkpoint of the live set in a file, with
/// commas between them: one as it is written, several where files were merged.
pub(crate) const CHECKPOINT_SEQ: &str = "vramscope.checkpoint_seq";

/// A Parquet file that is being written.
pub(crate) struct Sealer {
    name: FileName,
    path: PathBuf,
    /// A second descriptor of the file, to flush it to disk when it is finished.
    file: File,
    writer: ArrowWriter<File>,
}

impl std::fmt::Debug for Sealer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sealer").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Sealer {
    /// Begins a file in `staging/`. What an earlier attempt left there is removed.
    pub(crate) fn new(dir: &LogDir, manifest: &Manifest, name: FileName) -> Result<Self> {
        let staged = name.with(name::TMP);
        let path = dir.path_in(Area::Staging, &staged);
        let Some(table) = TABLES.get(name.table) else {
            return Err(LogError::content(&path, "no such table"));
        };
        dir.remove(Area::Staging, &staged)?;
        let file = dir.create_file(Area::Staging, &staged)?;
        let second = file.try_clone().map_err(|e| LogError::io("open", &path, e))?;
        let metadata = manifest.metadata(table.name).into_iter();
        let metadata = metadata.map(|(key, value)| KeyValue::new(key, value)).collect();
        let properties = properties(table, metadata, ROW_GROUP_ROWS);
        let writer = ArrowWriter::try_new(second, table.arrow_schema(), Some(properties))
            .map_err(|e| LogError::parquet("begin", &path, e))?;
        Ok(Self { name, path, file, writer })
    }

    /// Appends a batch.
    pub(crate) fn write(&mut self, batch: &RecordBatch) -> Result<()> {
        let failed = |e| LogError::parquet("write", &self.path, e);
        self.writer.write(batch).map_err(failed)?;
        if self.writer.memory_size() > ROW_GROUP_BYTES {
            self.writer.flush().map_err(failed)?;
        }
        Ok(())
    }

    /// Says one more thing in the file's metadata.
    pub(crate) fn note(&mut self, key: &str, value: String) {
        self.writer.append_key_value_metadata(KeyValue::new(key.to_owned(), value));
    }

    /// Bytes written and bytes held in memory, encoded: about the size of the finished file.
    pub(crate) fn bytes(&self) -> u64 {
        (self.writer.bytes_written() + self.writer.in_progress_size()) as u64
    }

    /// Bytes held in memory.
    #[cfg(test)]
    pub(crate) fn memory(&self) -> usize {
        self.writer.memory_size()
    }

    /// Finishes the file and moves it to its table. Returns its path relative to the log, and its
    /// size. On error nothing is left in `staging/`.
    pub(crate) fn finish(self, dir: &LogDir, date: &str) -> Result<(PathBuf, u64)> {
        let Self { name, path, file, writer } = self;
        let sealed = writer
            .close()
            .map_err(|e| LogError::parquet("finish", &path, e))
            .and_then(|_| dir.seal(&file, name, date));
        let Ok(relative) = sealed else {
            discard(dir, name);
            return sealed.map(|relative| (relative, 0));
        };
        let bytes = file.metadata().map_err(|e| LogError::io("look at", &path, e))?.len();
        Ok((relative, bytes))
    }

    /// Gives up: removes the unfinished file, which may free the space that is missing.
    pub(crate) fn abandon(self, dir: &LogDir) {
        discard(dir, self.name);
    }
}

fn discard(dir: &LogDir, name: FileName) {
    if let Err(e) = dir.remove(Area::Staging, &name.with(name::TMP)) {
        tracing::debug!(error = %e, "unfinished file left behind");
    }
}

/// How a file of `table` is written that says `metadata` of itself.
pub(super) fn properties(
    table: &Table,
    metadata: Vec<KeyValue>,
    row_group_rows: usize,
) -> WriterProperties {
    let zstd = ZstdLevel::try_new(ZSTD_LEVEL).unwrap_or_default();
    let builder = WriterProperties::builder()
        .set_created_by(concat!("vramscope ", env!("CARGO_PKG_VERSION")).to_owned())
        .set_compression(Compression::ZSTD(zstd))
        .set_max_row_group_row_count(Some(row_group_rows))
        .set_key_value_metadata(Some(metadata));
    table
        .columns()
        .filter(|column| is_rising(column.name, column.ty))
        .fold(builder, |builder, column| delta(builder, column.name))
        .build()
}

/// Whether nearly every value is new and near the one before: a dictionary would hold them all.
fn is_rising(name: &str, ty: ColumnType) -> bool {
    match ty {
        ColumnType::Micros => true,
        ColumnType::I64 => matches!(name, "seq" | "alloc_id") || name.ends_with("ts_ns"),
        _ => false,
    }
}

fn delta(builder: WriterPropertiesBuilder, column: &str) -> WriterPropertiesBuilder {
    let path = ColumnPath::from(column);
    builder
        .set_column_dictionary_enabled(path.clone(), false)
        .set_column_encoding(path, Encoding::DELTA_BINARY_PACKED)
}
