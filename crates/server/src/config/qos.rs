//! What the keys of quality of service mean together.

use hdcs_core::node::qos::Qos;

use super::{ConfigError, MIB, VolumeSettings};

/// More than any device does.
pub const IOPS_MAX: u64 = 100_000_000;
/// More than any device does.
pub const BANDWIDTH_MAX_MIB_S: u64 = 1 << 20;
/// A day at a thousand a second.
pub const BURST_MAX: u64 = 86_400_000;

impl VolumeSettings {
    /// What the scheduler of requests takes.
    pub const fn qos(&self) -> Qos {
        Qos {
            iops_max: self.iops_max,
            bandwidth_max: self.bandwidth_max_mib_s * MIB,
            iops_burst: self.iops_burst,
            bandwidth_burst: self.bandwidth_burst_mib * MIB,
            iops_min: self.iops_min,
            bandwidth_min: self.bandwidth_min_mib_s * MIB,
            weight: self.qos_weight,
        }
    }

    /// Refuse what cannot be kept. Whether the device can do what is reserved nobody knows
    /// beforehand: that shows.
    pub(super) fn check_qos(&self) -> Result<(), ConfigError> {
        let refuse = |message| Err(ConfigError::Relation(message));
        for (kind, min, max, burst) in [
            ("iops_", self.iops_min, self.iops_max, self.iops_burst),
            (
                "bandwidth_",
                self.bandwidth_min_mib_s,
                self.bandwidth_max_mib_s,
                self.bandwidth_burst_mib,
            ),
        ] {
            let (unit, saved) = if kind == "iops_" {
                ("", "")
            } else {
                ("_mib_s", "_mib")
            };
            if max > 0 && min > max {
                return refuse(format!(
                    "{kind}min{unit} ({min}) must not be above {kind}max{unit} ({max}): more would be \
                     reserved than is allowed"
                ));
            }
            if max == 0 && burst > 0 {
                return refuse(format!(
                    "{kind}burst{saved} ({burst}) needs {kind}max{unit}: without a limit there is \
                     nothing to go beyond"
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qos_contradictions_are_refused_by_name() {
        let good = VolumeSettings {
            iops_min: 10,
            iops_max: 10,
            iops_burst: 5,
            bandwidth_min_mib_s: 7,
            ..VolumeSettings::default()
        };
        good.check().unwrap();
        assert_eq!(good.qos().bandwidth_min, 7 << 20);
        let mut bad = good.clone();
        bad.iops_min = 11;
        let error = bad.check().unwrap_err().to_string();
        assert!(
            error.contains("iops_min (11) must not be above iops_max (10)"),
            "{error}"
        );
        let mut bad = good.clone();
        bad.bandwidth_max_mib_s = 6;
        let error = bad.check().unwrap_err().to_string();
        assert!(error.contains("bandwidth_min_mib_s (7)"), "{error}");
        let mut bad = good;
        bad.bandwidth_burst_mib = 1;
        let error = bad.check().unwrap_err().to_string();
        assert!(
            error.contains("bandwidth_burst_mib (1) needs bandwidth_max_mib_s"),
            "{error}"
        );
    }
}
