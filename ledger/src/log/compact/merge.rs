//! Several files into one, batch by batch.

use std::{fs::File, os::fd::OwnedFd, path::Path, sync::Arc, time::UNIX_EPOCH};

use arrow::{
    array::{AsArray, RecordBatch, UInt32Array, new_null_array},
    compute::{concat_batches, take_record_batch},
    datatypes::{Int64Type, SchemaRef},
};
use parquet::{
    arrow::{ArrowWriter, arrow_reader::ParquetRecordBatchReaderBuilder},
    file::metadata::KeyValue,
};
use rustix::fs::{self, Mode, OFlags};

use super::{
    plan::{self, Group},
    swap::Place,
};
use crate::log::{
    error::{LogError, Result, guard},
    reader::footer,
    seal::{CHECKPOINT_SEQ, ROW_GROUP_BYTES, properties},
};

/// Rows of a row group: merged files are read from end to end more often than in parallel, and
/// larger groups take less space.
const ROW_GROUP_ROWS: usize = 1 << 20;

/// Rows of a batch.
const BATCH_ROWS: usize = 8_192;

/// Events that came late are put in their place within so many rows; the ledger numbers events
/// within a window that is much smaller.
const WINDOW_ROWS: usize = 32_768;

/// Says how many files a merged one stands in for.
const MERGED_FILES: &str = "vramscope.merged_files";

/// Merges the files of a group into one in `into`, on disk when this returns; its bytes.
pub(super) fn merge(
    place: &Place<'_>,
    group: &Group,
    from: &OwnedFd,
    into: &OwnedFd,
) -> Result<u64> {
    let [first, .., last] = group.inputs.as_slice() else { return Ok(0) };
    let path = place.staged_path(&first.file_name());
    let file = create(into, &first.file_name(), &path)?;
    let second = file.try_clone().map_err(|e| LogError::io("open", &path, e))?;
    let metadata = metadata(place, group, from)?;
    let schema = place.table.arrow_schema();
    let properties = properties(place.table, metadata, ROW_GROUP_ROWS);
    let writer = ArrowWriter::try_new(second, Arc::clone(&schema), Some(properties))
        .map_err(|e| LogError::parquet("begin", &path, e))?;
    let mut output = Output { path: &path, writer, order: Order::new(&schema), rows: 0 };
    for input in &group.inputs {
        copy(place, from, &input.file_name(), &schema, &mut output)?;
    }
    let rows = output.finish()?;
    if rows != group.rows() {
        let problem = format!("{rows} rows came of {}: nothing is replaced", group.rows());
        return Err(LogError::content(&path, problem));
    }
    dress(&file, &last.stat, &path)
}

fn create(into: &OwnedFd, file_name: &str, path: &Path) -> Result<File> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    fs::openat(into, file_name, flags, Mode::RUSR | Mode::WUSR)
        .map(File::from)
        .map_err(|e| LogError::io("create", path, e))
}

/// Gives the file owner, mode and age of those it stands in for (`--max-disk` deletes by age), and
/// forces it to disk; its bytes.
fn dress(file: &File, like: &fs::Stat, path: &Path) -> Result<u64> {
    let own = fs::fstat(file).map_err(|e| LogError::io("look at", path, e))?;
    if (own.st_uid, own.st_gid) != (like.st_uid, like.st_gid) {
        let (uid, gid) = (fs::Uid::from_raw(like.st_uid), fs::Gid::from_raw(like.st_gid));
        fs::fchown(file, Some(uid), Some(gid))
            .map_err(|e| LogError::io("change the owner of", path, e))?;
    }
    fs::fchmod(file, Mode::from_raw_mode(like.st_mode & 0o7777))
        .map_err(|e| LogError::io("change the mode of", path, e))?;
    let age = std::time::Duration::new(like.st_mtime.max(0) as u64, like.st_mtime_nsec as u32);
    file.set_modified(UNIX_EPOCH + age).map_err(|e| LogError::io("change the time of", path, e))?;
    fs::fsync(file).map_err(|e| LogError::io("write to disk", path, e))?;
    Ok(own.st_size.max(0) as u64)
}

/// What the first file says of itself, and what is new of the merged one.
fn metadata(place: &Place<'_>, group: &Group, from: &OwnedFd) -> Result<Vec<KeyValue>> {
    let Some(first) = group.inputs.first() else { return Ok(Vec::new()) };
    let path = place.path(&first.file_name());
    let footer = footer(&plan::open(place, from, &first.file_name())?, &path)?;
    let pairs = footer.metadata().file_metadata().key_value_metadata().cloned();
    let is_ours = |pair: &KeyValue| {
        pair.key.starts_with("vramscope.")
            && ![CHECKPOINT_SEQ, MERGED_FILES].contains(&pair.key.as_str())
    };
    let mut pairs: Vec<KeyValue> = pairs.into_iter().flatten().filter(is_ours).collect();
    let mut say = |key: &str, value: String| pairs.push(KeyValue::new(key.to_owned(), value));
    say(MERGED_FILES, group.inputs.len().to_string());
    let seqs = group.inputs.iter().flat_map(|input| &input.checkpoints);
    let seqs: Vec<String> = seqs.map(i64::to_string).collect();
    if !seqs.is_empty() {
        say(CHECKPOINT_SEQ, seqs.join(","));
    }
    Ok(pairs)
}

/// Copies the rows of one file.
fn copy(
    place: &Place<'_>,
    from: &OwnedFd,
    file_name: &str,
    schema: &SchemaRef,
    output: &mut Output<'_>,
) -> Result<()> {
    let path = place.path(file_name);
    let file = plan::open(place, from, file_name)?;
    let mut batches = guard(&path, || {
        let failed = |e| LogError::parquet("read", &path, e);
        let reader = ParquetRecordBatchReaderBuilder::try_new(file).map_err(failed)?;
        reader.with_batch_size(BATCH_ROWS).build().map_err(failed)
    })?;
    loop {
        let next = guard(&path, || {
            batches.next().transpose().map_err(|e| LogError::arrow("read", &path, e))
        });
        let Some(batch) = next? else { return Ok(()) };
        output.take(&fitted(&batch, schema, &path)?)?;
    }
}

/// The batch with this version's columns; those that its file does not have yet are NULL.
fn fitted(batch: &RecordBatch, schema: &SchemaRef, path: &Path) -> Result<RecordBatch> {
    let columns = schema.fields().iter().map(|field| match batch.column_by_name(field.name()) {
        Some(column) => Arc::clone(column),
        None => new_null_array(field.data_type(), batch.num_rows()),
    });
    RecordBatch::try_new(Arc::clone(schema), columns.collect())
        .map_err(|e| LogError::arrow("read", path, e))
}

/// The merged file.
struct Output<'a> {
    path: &'a Path,
    writer: ArrowWriter<File>,
    order: Option<Order>,
    rows: u64,
}

impl Output<'_> {
    fn take(&mut self, batch: &RecordBatch) -> Result<()> {
        let failed = |e| LogError::arrow("put in order rows for", self.path, e);
        match &mut self.order {
            None => self.write(batch),
            Some(order) => match order.take(batch).map_err(failed)? {
                Some(ready) => self.write(&ready),
                None => Ok(()),
            },
        }
    }

    fn write(&mut self, batch: &RecordBatch) -> Result<()> {
        let failed = |e| LogError::parquet("write", self.path, e);
        self.rows += batch.num_rows() as u64;
        self.writer.write(batch).map_err(failed)?;
        if self.writer.memory_size() > ROW_GROUP_BYTES {
            self.writer.flush().map_err(failed)?;
        }
        Ok(())
    }

    /// Finishes the file; how many rows it has.
    fn finish(mut self) -> Result<u64> {
        let failed = |e| LogError::arrow("put in order rows for", self.path, e);
        if let Some(rest) = self.order.take().map(Order::rest).transpose().map_err(failed)? {
            self.write(&rest)?;
        }
        self.writer.close().map_err(|e| LogError::parquet("finish", self.path, e))?;
        Ok(self.rows)
    }
}

/// Puts rows that are nearly in the order of `seq` into it.
struct Order {
    schema: SchemaRef,
    /// Position of `seq`.
    key: usize,
    held: Vec<RecordBatch>,
    rows: usize,
}

type ArrowResult<T> = std::result::Result<T, arrow::error::ArrowError>;

impl Order {
    /// For tables whose rows are numbered; those of the others stay as they were written.
    fn new(schema: &SchemaRef) -> Option<Self> {
        let (key, _) = schema.column_with_name("seq")?;
        Some(Self { schema: Arc::clone(schema), key, held: Vec::new(), rows: 0 })
    }

    /// Takes rows; hands out those that no later one can come before.
    fn take(&mut self, batch: &RecordBatch) -> ArrowResult<Option<RecordBatch>> {
        self.held.push(batch.clone());
        self.rows += batch.num_rows();
        if self.rows < 2 * WINDOW_ROWS {
            return Ok(None);
        }
        let sorted = self.sorted()?;
        let ready = self.rows - WINDOW_ROWS;
        self.held = vec![sorted.slice(ready, WINDOW_ROWS)];
        self.rows = WINDOW_ROWS;
        Ok(Some(sorted.slice(0, ready)))
    }

    fn sorted(&self) -> ArrowResult<RecordBatch> {
        let all = concat_batches(&self.schema, &self.held)?;
        let Some(seqs) = all.column(self.key).as_primitive_opt::<Int64Type>() else {
            return Ok(all);
        };
        let seqs = seqs.values();
        if seqs.is_sorted() {
            return Ok(all);
        }
        let mut order: Vec<u32> = (0..seqs.len() as u32).collect();
        // A stable sort: rows of a checkpoint share one number, and keep their order.
        order.sort_by_key(|&row| seqs.get(row as usize));
        take_record_batch(&all, &UInt32Array::from(order))
    }

    fn rest(self) -> ArrowResult<RecordBatch> {
        self.sorted()
    }
}
