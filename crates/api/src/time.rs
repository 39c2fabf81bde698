//! Times as the API and the command line give them.

use std::time::{SystemTime, UNIX_EPOCH};

/// Milliseconds since 1970.
pub fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}

/// A time as people write it: `2026-11-21T12:30:15.250Z`.
pub fn utc(unix_ms: u64) -> String {
    let seconds = (unix_ms / 1000).cast_signed();
    // SAFETY: all zeroes is a valid `tm`, and the call writes one.
    let tm = unsafe {
        let mut tm: libc::tm = std::mem::zeroed();
        libc::gmtime_r(&raw const seconds, &raw mut tm);
        tm
    };
    format!(
        "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z",
        tm.tm_year + 1900,
        tm.tm_mon + 1,
        tm.tm_mday,
        tm.tm_hour,
        tm.tm_min,
        tm.tm_sec,
        unix_ms % 1000
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn utc_is_as_the_calendar_says() {
        assert_eq!(utc(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(utc(951_782_400_250), "2000-02-29T00:00:00.250Z");
    }
}
