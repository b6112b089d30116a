//! Whether the files of a log have the columns that the schema gives them.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use arrow::datatypes::{DataType, Schema};

use super::{Table, reader::Log};

/// How a file's columns differ from those of its table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Difference {
    /// The file does not have a column that may not be NULL.
    Missing(&'static str),
    /// Nor one that may: it is older than the column.
    Older(&'static str),
    /// It has one that this version does not know: it is newer, or not ours.
    Unknown(String),
    /// Another type.
    Type { column: String, expected: DataType, found: DataType },
    /// It allows NULLs where there must be none.
    Nullable(String),
}

impl Difference {
    /// Whether a version of vramscope may differ so by itself: columns that may be NULL are
    /// appended.
    pub(super) fn is_of_versions(&self) -> bool {
        matches!(self, Self::Older(_) | Self::Unknown(_))
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(column) => write!(f, "it has no column {column}, which it must have"),
            Self::Older(column) => {
                write!(f, "it has no column {column} yet, written by an older vramscope: NULL")
            }
            Self::Unknown(column) => {
                write!(
                    f,
                    "it has a column {column} that this vramscope does not know; use a newer one"
                )
            }
            Self::Type { column, expected, found } => write!(
                f,
                "column {column} is {found}, not {expected}; was the file written by vramscope?"
            ),
            Self::Nullable(column) => write!(f, "column {column} may be NULL, which it must not"),
        }
    }
}

/// What is different in a file of `table`.
pub(super) fn differences(table: &'static Table, found: &Schema) -> Vec<Difference> {
    let expected = table.arrow_schema();
    let missing = table.columns().filter(|column| found.field_with_name(column.name).is_err());
    let mut differences: Vec<Difference> = missing
        .map(|column| {
            let kind = if column.nullable { Difference::Older } else { Difference::Missing };
            kind(column.name)
        })
        .collect();
    for field in found.fields() {
        let column = field.name().clone();
        let Ok(known) = expected.field_with_name(&column) else {
            differences.push(Difference::Unknown(column));
            continue;
        };
        let (expected, found) = (known.data_type().clone(), field.data_type().clone());
        if expected != found {
            differences.push(Difference::Type { column, expected, found });
        } else if field.is_nullable() && !known.is_nullable() {
            differences.push(Difference::Nullable(column));
        }
    }
    differences
}

/// How the files of a log fit the schema.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Files that were looked at: sealed ones and journals.
    pub files: u64,
    /// Files that do not fit, or cannot be read, and why.
    pub wrong: Vec<(PathBuf, String)>,
    /// Files of older and newer versions, which are read all the same, and what is different.
    pub of_other_versions: Vec<(PathBuf, String)>,
}

impl Log {
    /// Checks the files against the schema; reads footers, no rows.
    pub fn check(&self) -> Checked {
        let problems = self.problems().iter();
        let wrong: Vec<_> = problems.map(|p| (p.path.clone(), p.message.clone())).collect();
        let mut checked = Checked { files: wrong.len() as u64, wrong, ..Checked::default() };
        for (path, table, schema) in self.schemas() {
            checked.files += 1;
            match schema {
                Ok(schema) => checked.compare(path, table, &schema),
                Err(e) => checked.wrong.push((path.to_owned(), super::error::chain(&e))),
            }
        }
        checked
    }
}

impl Checked {
    fn compare(&mut self, path: &Path, table: &'static Table, schema: &Schema) {
        for difference in differences(table, schema) {
            let list = if difference.is_of_versions() {
                &mut self.of_other_versions
            } else {
                &mut self.wrong
            };
            list.push((path.to_owned(), difference.to_string()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{path::Path, sync::Arc};

    use arrow::{
        array::{ArrayRef, Int32Array, RecordBatch, StringArray, new_null_array},
        datatypes::{Field, Schema},
    };

    use super::*;
    use crate::log::{
        BatchRows, Options, Row, RunInfo, TABLES, Writer, manifest::tests::info, testing::*,
    };
    use crate::rows::*;

    /// A finished log with some rows in a table, and the path of their file.
    fn log_of<R: Row>(dir: &Path) -> PathBuf {
        let mut writer = Writer::create(dir, &info("host-a"), Options::default()).unwrap();
        for row in Random(7).rows::<R>(20) {
            writer.push(&row);
        }
        let (run, table) = (writer.run8(), R::TABLE.name);
        writer.finish(START + 1).unwrap();
        dir.join(format!("{table}/date=2026-11-30/{table}-{run}-000001.parquet"))
    }

    fn open(dir: &Path) -> Log {
        Log::open(&[dir.to_owned()]).unwrap()
    }

    /// The batch without the columns that `drop` picks.
    fn without(batch: &RecordBatch, drop: impl Fn(&Field) -> bool) -> RecordBatch {
        let schema = batch.schema();
        let kept = schema.fields().iter().enumerate().filter(|(_, field)| !drop(field));
        let kept: Vec<usize> = kept.map(|(at, _)| at).collect();
        batch.project(&kept).unwrap()
    }

    /// The batch with one more column, or another in the place of one.
    fn with(batch: &RecordBatch, name: &str, array: ArrayRef, nullable: bool) -> RecordBatch {
        let batch = without(batch, |field| field.name() == name);
        let field = Field::new(name, array.data_type().clone(), nullable);
        let mut fields: Vec<_> = batch.schema().fields().iter().cloned().collect();
        fields.push(field.into());
        let columns = batch.columns().iter().cloned().chain([array]).collect();
        RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).unwrap()
    }

    /// What a file of `R` reads as when its batches are changed, and what the check says of it.
    fn changed<R: Row>(change: impl Fn(&RecordBatch) -> RecordBatch) -> (Vec<Option<R>>, Checked) {
        let temp = tempfile::tempdir().unwrap();
        let path = log_of::<R>(temp.path());
        rewrite(&path, change);
        let log = open(temp.path());
        assert_eq!(log.problems(), []);
        (log.rows::<R>().map(Result::ok).collect(), log.check())
    }

    /// Older files have none of the columns that may be NULL, newer ones have columns more.
    fn other_versions<R: Row + PartialEq>() {
        let table = R::TABLE;
        let temp = tempfile::tempdir().unwrap();
        log_of::<R>(temp.path());
        let all: Vec<R> = open(temp.path()).rows::<R>().map(Result::unwrap).collect();
        let nullable = table.fields.iter().filter(|column| column.nullable).count();

        let (rows, checked) = changed::<R>(|batch| without(batch, Field::is_nullable));
        assert_eq!(rows.len(), 20, "{}", table.name);
        assert!(rows.iter().all(Option::is_some), "{}", table.name);
        assert_eq!((checked.wrong.len(), checked.of_other_versions.len()), (0, nullable));
        let nulls = |batch: &RecordBatch| {
            let schema = batch.schema();
            let columns = schema.fields().iter().zip(batch.columns()).map(|(f, column)| {
                if f.is_nullable() {
                    new_null_array(f.data_type(), batch.num_rows())
                } else {
                    Arc::clone(column)
                }
            });
            RecordBatch::try_new(batch.schema(), columns.collect()).unwrap()
        };
        let (same, _) = changed::<R>(nulls);
        assert_eq!(rows, same, "{}: no column and NULL are the same", table.name);

        let (rows, checked) = changed::<R>(|batch| {
            let new: ArrayRef = Arc::new(StringArray::from(vec![Some("new"); batch.num_rows()]));
            with(batch, "of_tomorrow", new, true)
        });
        assert_eq!(rows, all.into_iter().map(Some).collect::<Vec<_>>());
        let [(path, told)] = &checked.of_other_versions[..] else { panic!("{checked:?}") };
        assert!(told.contains("of_tomorrow") && path.ends_with(path), "{told}");
        assert_eq!(checked.wrong, []);
    }

    #[test]
    fn older_and_newer_files_of_every_table_are_read_and_told() {
        other_versions::<EventRow>();
        other_versions::<SiteUsageRow>();
        other_versions::<BreakdownRow>();
        other_versions::<DeviceSampleRow>();
        other_versions::<ProcessSampleRow>();
        other_versions::<HostSampleRow>();
        other_versions::<ProcessRow>();
        other_versions::<ProcessLibRow>();
        other_versions::<DeviceRow>();
        other_versions::<StackRow>();
        other_versions::<FrameRow>();
        other_versions::<OomRow>();
        other_versions::<AnnotationRow>();
        other_versions::<LossRow>();
    }

    #[test]
    fn a_log_as_it_is_written_fits() {
        let temp = tempfile::tempdir().unwrap();
        log_of::<EventRow>(temp.path());
        let other = RunInfo { pid: 2, ..info("host-a") };
        let mut live = Writer::create(temp.path(), &other, Options::default()).unwrap();
        push_events(&mut live, 1..=10);
        live.tick(START + 1_000_000_000);
        let checked = open(temp.path()).check();
        let files = 2 * TABLES.len() as u64 + 2;
        assert_eq!(checked, Checked { files, ..Checked::default() });
    }

    #[test]
    fn columns_that_are_wrong_are_named_and_not_read() {
        let short: fn(&RecordBatch) -> ArrayRef =
            |batch| Arc::new(Int32Array::from(vec![1; batch.num_rows()]));
        for (told, change) in [
            (
                "no column reason, which it must have",
                Box::new(|batch: &RecordBatch| without(batch, |field| field.name() == "reason"))
                    as Box<dyn Fn(&RecordBatch) -> RecordBatch>,
            ),
            (
                "column count is Int32, not Int64",
                Box::new(move |batch| with(batch, "count", short(batch), false)),
            ),
        ] {
            let (rows, checked) = changed::<LossRow>(change);
            assert_eq!(rows.iter().flatten().count(), 0);
            let [(path, said)] = &checked.wrong[..] else { panic!("{checked:?}") };
            assert!(said.contains(told), "{said}");
            assert!(path.to_str().unwrap().ends_with("-000001.parquet"));
        }
        let (rows, checked) = changed::<LossRow>(|batch| {
            let count = batch.column_by_name("count").unwrap();
            with(batch, "count", Arc::clone(count), true)
        });
        assert_eq!(rows.iter().flatten().count(), 20, "there are no NULLs in it");
        assert!(checked.wrong[0].1.contains("column count may be NULL"), "{checked:?}");
    }

    #[test]
    fn what_cannot_be_read_does_not_fit() {
        let temp = tempfile::tempdir().unwrap();
        let path = log_of::<EventRow>(temp.path());
        std::fs::write(&path, "PAR1").unwrap();
        let checked = open(temp.path()).check();
        assert_eq!(checked.files, TABLES.len() as u64 + 1);
        let [(wrong, why)] = &checked.wrong[..] else { panic!("{checked:?}") };
        assert!(*wrong == path && why.contains("cut off"), "{why}");
    }

    #[test]
    fn batches_with_columns_that_are_not_known_keep_the_others() {
        let batch = log_batch();
        let extra: ArrayRef = Arc::new(Int32Array::from(vec![1; batch.num_rows()]));
        let batch = with(&batch, "of_tomorrow", extra, true);
        assert_eq!(BatchRows::<LossRow>::new(&batch, Path::new("x")).unwrap().count(), 3);
    }

    fn log_batch() -> RecordBatch {
        let mut builder = crate::log::BatchBuilder::new(LossRow::TABLE);
        Random(3).rows::<LossRow>(3).iter().for_each(|row| builder.append(row));
        builder.finish().unwrap()
    }
}
