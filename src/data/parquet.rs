//! Rows of a parquet file as JSON objects; only the columns that mean something here are read.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use parquet::file::metadata::{ParquetMetaData, RowGroupMetaData};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use parquet::schema::types::Type;
use serde_json::{Map, Value};

use super::row::Place;
use super::source::{Rows, Unread};
use crate::error::{Error, Result};

/// Opens a parquet file; of its columns the `wanted` ones are read.
pub(super) fn rows(path: &Path, wanted: &[String]) -> Result<Rows> {
    let file = File::open(path).map_err(|e| Error::io(path, "read", e))?;
    let fault = |error: parquet::errors::ParquetError| not_parquet(path, &error.to_string());
    let reader = SerializedFileReader::new(file).map_err(fault)?;
    let schema = reader.metadata().file_metadata().schema_descr().root_schema().clone();
    let projection = projection(&schema, wanted).map_err(fault)?;
    let file = Arc::new(path.to_path_buf());
    let at_once = rows_at_once(reader.metadata());
    let rows = RowIter::from_file_into(Box::new(reader)).with_batch_size(at_once);
    let rows = rows.project(projection).map_err(fault)?;
    Ok(Box::new(rows.enumerate().map(move |(i, row)| {
        let place = Place { file: file.clone(), row: i + 1 };
        let row = row.map_err(|e| Error::data(file.as_ref(), i + 1, format!("broken parquet: {e}"), ""))?;
        Ok(Unread::columns(place, group(&row), true))
    })))
}

/// How many rows are decoded at a time: about a megabyte of them.
fn rows_at_once(metadata: &ParquetMetaData) -> usize {
    const BYTES: i64 = 1 << 20;
    const MOST: i64 = 1024;
    let row_bytes = |group: &RowGroupMetaData| group.total_byte_size() / group.num_rows().max(1);
    let largest = metadata.row_groups().iter().map(row_bytes).max().unwrap_or(1);
    (BYTES / largest.max(1)).clamp(1, MOST) as usize
}

fn not_parquet(path: &Path, message: &str) -> Error {
    Error::data(
        path,
        None,
        format!("not a readable parquet file: {message}"),
        "If it is another format, give it its own ending; if a download was cut, fetch it again.",
    )
}

/// The wanted columns, or all where none is wanted (so that the error can name them).
fn projection(schema: &Type, wanted: &[String]) -> parquet::errors::Result<Option<Type>> {
    let is_wanted = |name: &str| wanted.iter().any(|wanted| wanted == name);
    let wanted: Vec<_> = schema.get_fields().iter().filter(|f| is_wanted(f.name())).cloned().collect();
    if wanted.is_empty() {
        return Ok(None);
    }
    Type::group_type_builder(schema.name()).with_fields(wanted).build().map(Some)
}

fn value(field: &Field) -> Value {
    match field {
        Field::Null => Value::Null,
        Field::Bool(b) => (*b).into(),
        Field::Byte(n) => (*n).into(),
        Field::Short(n) => (*n).into(),
        Field::Int(n) => (*n).into(),
        Field::Long(n) => (*n).into(),
        Field::UByte(n) => (*n).into(),
        Field::UShort(n) => (*n).into(),
        Field::UInt(n) => (*n).into(),
        Field::ULong(n) => (*n).into(),
        Field::Float(x) => f64::from(*x).into(),
        Field::Double(x) => (*x).into(),
        Field::Str(text) => text.as_str().into(),
        // Strings of writers that don't mark them as such.
        Field::Bytes(bytes) => String::from_utf8_lossy(bytes.data()).into(),
        Field::Group(row) => Value::Object(group(row)),
        Field::ListInternal(list) => Value::Array(list.elements().iter().map(value).collect()),
        Field::MapInternal(map) => {
            map.entries().iter().map(|(key, item)| (key_text(key), value(item))).collect()
        }
        // Dates, times, decimals: as parquet prints them.
        other => other.to_string().into(),
    }
}

fn group(row: &Row) -> Map<String, Value> {
    row.get_column_iter().map(|(name, field)| (name.clone(), value(field))).collect()
}

fn key_text(key: &Field) -> String {
    match value(key) {
        Value::String(text) => text,
        other => other.to_string(),
    }
}
