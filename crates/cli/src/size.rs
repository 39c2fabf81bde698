//! Sizes as people type and read them: `4096`, `512M`, `1.5T`. Units are powers of 1024.

use std::str::FromStr;

const UNITS: [(char, u32); 5] = [('K', 10), ('M', 20), ('G', 30), ('T', 40), ('P', 50)];

/// Why a size was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// Not a number with a unit.
    #[error("not a size: write a number and one of K, M, G, T, P, such as 10G, 512M or 4096")]
    Form,
    /// A unit that there is not.
    #[error("unknown unit `{0}`: the units are K, M, G, T and P, powers of 1024 (10G, 10GiB)")]
    Unit(String),
    /// A fraction of a byte.
    #[error("not a whole number of bytes")]
    Fraction,
    /// More than 64 bits.
    #[error("too large")]
    TooLarge,
}

/// A size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let end = text
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(text.len());
        let (number, unit) = text.split_at(end);
        let shift = match unit {
            "" | "B" => 0,
            _ => {
                let letter = unit.chars().next().unwrap_or(' ').to_ascii_uppercase();
                let known = UNITS.iter().find(|(name, _)| *name == letter);
                match (known, &unit[letter.len_utf8().min(unit.len())..]) {
                    (Some((_, shift)), "" | "iB" | "ib" | "i") => *shift,
                    _ if number.is_empty() => return Err(SizeError::Form),
                    _ => return Err(SizeError::Unit(unit.to_owned())),
                }
            }
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        // Nine digits keep the sum below within 128 bits, and nobody means more.
        if whole.is_empty() || fraction.contains('.') || fraction.len() > 9 || number.ends_with('.')
        {
            return Err(SizeError::Form);
        }
        let scale = 10_u128.pow(fraction.len() as u32);
        let whole: u64 = whole.parse().map_err(|_| SizeError::TooLarge)?;
        let fraction: u128 = if fraction.is_empty() {
            0
        } else {
            fraction.parse().map_err(|_| SizeError::Form)?
        };
        let scaled = (u128::from(whole) * scale + fraction) << shift;
        if !scaled.is_multiple_of(scale) {
            return Err(SizeError::Fraction);
        }
        u64::try_from(scaled / scale)
            .map(Self)
            .map_err(|_| SizeError::TooLarge)
    }
}

/// `bytes` for people: `1.5 GiB`.
pub fn show(bytes: u64) -> String {
    for (name, shift) in UNITS.iter().rev() {
        if bytes >> shift > 0 {
            let value = bytes as f64 / (1_u64 << shift) as f64;
            return if value.fract() == 0.0 {
                format!("{value} {name}iB")
            } else {
                format!("{value:.1} {name}iB")
            };
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_accepts_what_people_type() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4096B", 4096),
            ("10G", 10 << 30),
            ("10g", 10 << 30),
            ("10GiB", 10 << 30),
            ("512M", 512 << 20),
            ("1.5T", 3 << 39),
            ("0.5K", 512),
            ("16384P", u64::MAX),
        ] {
            if text == "16384P" {
                assert_eq!(text.parse::<Size>(), Err(SizeError::TooLarge));
            } else {
                assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
            }
        }
    }

    #[test]
    fn size_refuses_the_rest_and_says_why() {
        for (text, error) in [
            ("", SizeError::Form),
            ("G", SizeError::Form),
            ("ten", SizeError::Form),
            ("-1G", SizeError::Form),
            ("1..5G", SizeError::Form),
            ("1.G", SizeError::Form),
            (".5G", SizeError::Form),
            ("10GB", SizeError::Unit("GB".into())),
            ("10X", SizeError::Unit("X".into())),
            ("10 G", SizeError::Unit(" G".into())),
            ("1ü", SizeError::Unit("ü".into())),
            ("0.3K", SizeError::Fraction),
            ("1.5", SizeError::Fraction),
            ("99999999999999999999", SizeError::TooLarge),
        ] {
            assert_eq!(text.parse::<Size>(), Err(error), "{text}");
        }
    }

    #[test]
    fn size_is_shown_short() {
        assert_eq!(show(0), "0 B");
        assert_eq!(show(1023), "1023 B");
        assert_eq!(show(10 << 30), "10 GiB");
        assert_eq!(show(3 << 29), "1.5 GiB");
    }
}
