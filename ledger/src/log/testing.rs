//! Rows and runs for tests.

use std::{
    ops::RangeBounds,
    path::{Path, PathBuf},
    sync::Arc,
};

use arrow::array::{
    ArrayRef, BooleanArray, Int32Array, Int64Array, Int64Builder, ListBuilder, RecordBatch,
    StringArray, TimestampMicrosecondArray,
};

use parquet::{
    arrow::{ArrowWriter, arrow_reader::ParquetRecordBatchReaderBuilder},
    file::properties::WriterProperties,
};

use super::{BatchRows, ColumnType, Options, Row, Table, Writer, manifest::tests::info};
use crate::rows::EventRow;

/// `wall_ns` of the runs here: 2026-11-30 11:33:20 UTC.
pub(crate) const START: i64 = 1_796_000_000_000_000_000;

pub(crate) fn create(dir: &Path, options: Options) -> Writer {
    assert_eq!(info("host-a").clock.wall_ns, START);
    Writer::create(dir, &info("host-a"), options).unwrap()
}

pub(crate) fn event(seq: i64) -> EventRow {
    EventRow {
        seq,
        ts_ns: START + seq * 1_000,
        op: "alloc".into(),
        api: "cuMemAlloc_v2".into(),
        level: "device".into(),
        addr: 0x7f00_0000_0000 + (seq % 977) * 512,
        size_bytes: Some(512 * (seq % 31)),
        delta_bytes: 512 * (seq % 31),
        alloc_id: seq,
        stack_id: (seq % 300).wrapping_mul(0x9e37_79b9_7f4a_7c15_u64 as i64),
        gpu_uuid: Some("GPU-00000000-0000-0000-0000-000000000000".into()),
        ..Default::default()
    }
}

pub(crate) fn push_events(
    writer: &mut Writer,
    seqs: impl RangeBounds<i64> + IntoIterator<Item = i64>,
) {
    for seq in seqs {
        writer.push(&event(seq));
    }
}

/// xorshift64*: enough for values that differ.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn i64(&mut self) -> i64 {
        match self.next() % 5 {
            0 => i64::MIN,
            1 => i64::MAX,
            2 => (self.next() % 100) as i64 - 50,
            _ => self.next() as i64,
        }
    }

    fn text(&mut self) -> String {
        let words = ["", "cuMemAlloc_v2", "größer;als;ß", "a|b\n\"c\"", "\0", "🦀"];
        let word = words[self.next() as usize % words.len()];
        word.repeat(self.next() as usize % 3)
    }

    fn list(&mut self, rows: usize) -> ArrayRef {
        let mut builder = ListBuilder::new(Int64Builder::new());
        for _ in 0..rows {
            for _ in 0..self.next() % 4 {
                builder.values().append_value(self.i64());
            }
            builder.append(true);
        }
        Arc::new(builder.finish())
    }

    fn column(&mut self, ty: ColumnType, nullable: bool, rows: usize) -> ArrayRef {
        let known: Vec<bool> =
            (0..rows).map(|_| !nullable || !self.next().is_multiple_of(3)).collect();
        let known = known.into_iter();
        match ty {
            ColumnType::I64 => {
                Arc::new(known.map(|k| k.then(|| self.i64())).collect::<Int64Array>())
            }
            ColumnType::I32 => {
                Arc::new(known.map(|k| k.then(|| self.i64() as i32)).collect::<Int32Array>())
            }
            ColumnType::Bool => Arc::new(
                known.map(|k| k.then(|| self.next().is_multiple_of(2))).collect::<BooleanArray>(),
            ),
            ColumnType::Utf8 | ColumnType::Word => {
                Arc::new(known.map(|k| k.then(|| self.text())).collect::<StringArray>())
            }
            ColumnType::I64List => self.list(rows),
            ColumnType::Micros => {
                Arc::new(TimestampMicrosecondArray::from(vec![0; rows]).with_timezone("UTC"))
            }
        }
    }

    fn batch(&mut self, table: &Table, rows: usize) -> RecordBatch {
        let columns =
            table.columns().map(|column| self.column(column.ty, column.nullable, rows)).collect();
        RecordBatch::try_new(table.arrow_schema(), columns).unwrap()
    }

    /// Rows of any type, with values from all over their types.
    pub(crate) fn rows<R: Row>(&mut self, rows: usize) -> Vec<R> {
        let batch = self.batch(R::TABLE, rows);
        BatchRows::new(&batch, "random".as_ref()).unwrap().collect()
    }
}

/// Replaces the batches of a sealed file; what the file says of itself stays.
pub(crate) fn rewrite(path: &Path, change: impl Fn(&RecordBatch) -> RecordBatch) {
    let file = std::fs::File::open(path).unwrap();
    let reader = ParquetRecordBatchReaderBuilder::try_new(file).unwrap();
    let pairs = reader.metadata().file_metadata().key_value_metadata().cloned().unwrap();
    let pairs = pairs.into_iter().filter(|pair| pair.key.starts_with("vramscope.")).collect();
    let schema = Arc::clone(reader.schema());
    let batches: Vec<RecordBatch> = reader.build().unwrap().map(Result::unwrap).collect();
    let batches = if batches.is_empty() { vec![RecordBatch::new_empty(schema)] } else { batches };
    let batches: Vec<RecordBatch> = batches.iter().map(change).collect();
    let properties = WriterProperties::builder().set_key_value_metadata(Some(pairs)).build();
    let file = std::fs::File::create(path).unwrap();
    let mut writer = ArrowWriter::try_new(file, batches[0].schema(), Some(properties)).unwrap();
    for batch in &batches {
        writer.write(batch).unwrap();
    }
    writer.close().unwrap();
}

/// A file system of a few MiB, mounted for the test.
pub(crate) struct Tmpfs(PathBuf);

impl Tmpfs {
    pub(crate) fn mount(path: &Path, bytes: usize) -> Option<Self> {
        let options = std::ffi::CString::new(format!("size={bytes}")).unwrap();
        let flags = rustix::mount::MountFlags::empty();
        match rustix::mount::mount("tmpfs", path, "tmpfs", flags, options.as_c_str()) {
            Ok(()) => Some(Self(path.to_owned())),
            Err(e) => {
                println!("skipped: mounting a tmpfs needs root ({e})");
                None
            }
        }
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH).unwrap();
    }
}
