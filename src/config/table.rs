//! How the tables of the file are declared: `table!`, `tagged!` and `choice!` state each key's name, type,
//! default, limits and meaning once, and generate one method, [`Table::walk`], that visits the keys in order.
//! Reading, writing, comparing with the defaults and describing are walks.

use super::field::Field;
use std::ops::{Range, RangeFrom, RangeInclusive};

/// A table of the file: it walks its keys.
pub(crate) trait Table: Clone + PartialEq + Default {
    /// What the table is for: its doc comment, a line each.
    const ABOUT: &'static [&'static str];

    /// Visits every key, in the order of the file.
    fn walk<W: Walker>(&mut self, walker: &mut W);

    /// The defaults of each `type` of this table; one value where there is no choice. The first is the default.
    fn every() -> Vec<Self> {
        vec![Self::default()]
    }
}

/// Something that visits the keys of a table.
pub(crate) trait Walker {
    /// One key, where its value lives, and its default.
    fn key<T: Field>(&mut self, key: &Key, value: &mut T, default: T);

    /// The key `type`; the answer is the index of the type to go on with.
    fn tag(&mut self, tags: &[Tag], current: usize) -> usize;
}

/// What is declared of a key beside its type and default.
pub(crate) struct Key {
    pub name: &'static str,
    pub doc: &'static [&'static str],
    pub rule: Rule,
}

/// One value of a `type` key.
pub(crate) struct Tag {
    pub name: &'static str,
    pub doc: &'static [&'static str],
}

/// The limits of a value, checked where it is read.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) enum Rule {
    #[default]
    Any,
    /// From `low` to `high`; `below` leaves `high` itself out.
    Between { low: f64, high: f64, below: bool },
    /// One of these words.
    OneOf(&'static [&'static str]),
}

impl<N: Into<f64>> From<RangeFrom<N>> for Rule {
    fn from(range: RangeFrom<N>) -> Self {
        Rule::Between { low: range.start.into(), high: f64::INFINITY, below: false }
    }
}

impl<N: Into<f64>> From<Range<N>> for Rule {
    fn from(range: Range<N>) -> Self {
        Rule::Between { low: range.start.into(), high: range.end.into(), below: true }
    }
}

impl<N: Into<f64> + Copy> From<RangeInclusive<N>> for Rule {
    fn from(range: RangeInclusive<N>) -> Self {
        Rule::Between { low: (*range.start()).into(), high: (*range.end()).into(), below: false }
    }
}

impl<const N: usize> From<&'static [&'static str; N]> for Rule {
    fn from(words: &'static [&'static str; N]) -> Self {
        Rule::OneOf(words)
    }
}

impl Rule {
    /// The rule in words, to follow "wanted"; empty if anything goes.
    pub fn wanted(&self) -> String {
        match self {
            Rule::Any => String::new(),
            Rule::Between { low, high, .. } if high.is_infinite() => format!("at least {low}"),
            Rule::Between { low, high, below: true } => format!("at least {low} and below {high}"),
            Rule::Between { low, high, below: false } => format!("{low} to {high}"),
            Rule::OneOf(words) => one_of(words),
        }
    }

    pub fn allows(&self, number: f64) -> bool {
        match *self {
            Rule::Between { low, high, below } => {
                number >= low && (number < high || (!below && number == high))
            }
            _ => true,
        }
    }
}

/// "`a`, `b` or `c`".
pub(crate) fn one_of(words: &[impl std::fmt::Display]) -> String {
    let quoted: Vec<String> = words.iter().map(|w| format!("`{w}`")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => quoted.concat(),
    }
}

/// A table: `/// meaning`, `name: Type = default`, then limits (`1..`, `0.0..1.0`, words) if any, `;`.
/// `pub struct X: "sft"` fixes its `type`; a last line `..kind: Kind;` takes the keys of a [`tagged!`] enum in.
macro_rules! table {
    (
        $(#[doc = $about:literal])+
        $(#[derive($($derive:ident),+)])?
        pub struct $name:ident $(: $tag:literal)? {
            $( $(#[doc = $doc:literal])+ $field:ident: $ty:ty = $default:expr $(, $rule:expr)?; )*
            $( ..$flat:ident: $flat_ty:ty; )?
        }
    ) => {
        $(#[doc = $about])+
        #[derive(Debug, Clone, PartialEq $($(, $derive)+)?)]
        pub struct $name {
            $( $(#[doc = $doc])+ pub $field: $ty, )*
            $(
                /// The key `type`, and the keys that only this type has.
                pub $flat: $flat_ty,
            )?
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* $($flat: <$flat_ty>::default(),)? }
            }
        }

        impl $crate::config::table::Table for $name {
            const ABOUT: &'static [&'static str] = &[$($about),+];

            fn walk<W: $crate::config::table::Walker>(&mut self, walker: &mut W) {
                $( walker.tag(&[$crate::config::table::Tag { name: $tag, doc: Self::ABOUT }], 0); )?
                $( self.$flat.walk(walker); )?
                $( walker.key(&key!($field [$($doc),+] $($rule)?), &mut self.$field, $default); )*
            }

            fn every() -> Vec<Self> {
                every!(Self $(, $flat: $flat_ty)?)
            }
        }
    };
}

/// An enum chosen by the key `type`; the first one is the default. A variant has keys of its own in braces
/// (as in [`table!`]), or takes in a table (`Sft(table: SftDataConfig)`), or has nothing.
macro_rules! tagged {
    (
        $(#[doc = $about:literal])+
        pub enum $name:ident {
            $(
                $(#[doc = $variant_doc:literal])+
                $tag:literal => $variant:ident $(($inner:ident: $inner_ty:ty))? $({
                    $( $(#[doc = $doc:literal])+ $field:ident: $ty:ty = $default:expr $(, $rule:expr)?; )+
                })?
            ),+ $(,)?
        }
    ) => {
        $(#[doc = $about])+
        #[derive(Debug, Clone, PartialEq)]
        #[allow(clippy::large_enum_variant)] // a configuration holds one or two of each
        pub enum $name {
            $(
                $(#[doc = $variant_doc])+
                $variant $(($inner_ty))? $({ $( $(#[doc = $doc])+ $field: $ty ),+ })?
            ),+
        }

        impl $name {
            /// The value of the key `type`.
            pub fn kind(&self) -> &'static str {
                match self { $( Self::$variant { .. } => $tag ),+ }
            }
        }

        impl Default for $name {
            fn default() -> Self {
                <Self as $crate::config::table::Table>::every().swap_remove(0)
            }
        }

        impl $crate::config::table::Table for $name {
            const ABOUT: &'static [&'static str] = &[$($about),+];

            fn walk<W: $crate::config::table::Walker>(&mut self, walker: &mut W) {
                let tags = [$( $crate::config::table::Tag { name: $tag, doc: &[$($variant_doc),+] } ),+];
                let current = tags.iter().position(|t| t.name == self.kind()).expect("each variant has a tag");
                let wanted = walker.tag(&tags, current);
                if wanted != current {
                    *self = Self::every().swap_remove(wanted);
                }
                match self {
                    $( Self::$variant $(($inner))? $({ $($field),+ })? => {
                        $( $inner.walk(walker); )?
                        $( $( walker.key(&key!($field [$($doc),+] $($rule)?), $field, $default); )+ )?
                    } )+
                }
            }

            fn every() -> Vec<Self> {
                vec![$( Self::$variant $((<$inner_ty>::default()))? $({ $($field: $default),+ })? ),+]
            }
        }
    };
}

/// An enum of plain words, as they stand in the file.
macro_rules! choice {
    (
        $(#[doc = $about:literal])+
        pub enum $name:ident { $( $(#[doc = $doc:literal])+ $word:literal => $variant:ident ),+ $(,)? }
    ) => {
        $(#[doc = $about])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum $name { $( $(#[doc = $doc])+ $variant ),+ }

        impl $name {
            /// Every one of them.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The word as it stands in the file.
            pub fn as_str(&self) -> &'static str {
                match self { $( Self::$variant => $word ),+ }
            }
        }

        impl $crate::config::field::Field for $name {
            fn kind() -> String {
                $crate::config::table::one_of(&[$($word),+])
            }

            fn read(
                node: &$crate::config::source::Node,
                path: &str,
                reader: &mut $crate::config::read::Reader,
            ) -> Option<Self> {
                let word = String::read(node, path, reader)?;
                match word.as_str() {
                    $( $word => Some(Self::$variant), )+
                    _ => {
                        reader.not_one_of(node.place, path, &word, &[$($word),+]);
                        None
                    }
                }
            }

            fn write(&self) -> toml::Value {
                self.as_str().into()
            }
        }
    };
}

macro_rules! key {
    ($name:ident [$($doc:literal),+]) => { key!(@ $name [$($doc),+] $crate::config::table::Rule::Any) };
    ($name:ident [$($doc:literal),+] $rule:expr) => {
        key!(@ $name [$($doc),+] $crate::config::table::Rule::from($rule))
    };
    (@ $name:ident [$($doc:literal),+] $rule:expr) => {
        $crate::config::table::Key { name: stringify!($name), doc: &[$($doc),+], rule: $rule }
    };
}

macro_rules! every {
    ($name:ty) => {
        vec![Self::default()]
    };
    ($name:ty, $flat:ident: $flat_ty:ty) => {
        <$flat_ty>::every().into_iter().map(|$flat| Self { $flat, ..Self::default() }).collect()
    };
}
