//! `stream.attributes`.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use super::call;
use super::errors::PyResultExt as _;
use crate::attributes::{AccessPolicyWindow, AccessProperty, MemSyncDomain, MemSyncDomainMap, SynchronizationPolicy};
use crate::error::{Error, Result};
use crate::stream::Stream;

/// The attributes of a stream.
///
/// Each read and each assignment is a call of the driver, allowed while the stream captures. An attribute acts on work
/// that is queued after it was set. A bad value raises `InvalidValueError` before the call.
#[pyclass(name = "StreamAttributes", module = "rstream", frozen)]
pub(super) struct StreamAttributesPy(pub(super) Stream);

/// The value that `name` stands for among `all`.
fn by_name<T: Copy>(what: &str, name: &str, all: &[(&str, T)]) -> Result<T> {
    all.iter().find(|(known, _)| *known == name).map(|&(_, value)| value).ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|(name, _)| format!("{name:?}")).collect();
        Error::invalid(format!("{what}={name:?}: expected {}", names.join(", ")))
    })
}

fn name_of<T: PartialEq>(value: &T, all: &[(&'static str, T)]) -> &'static str {
    all.iter().find(|(_, known)| known == value).map_or("unknown", |(name, _)| name)
}

const POLICIES: [(&str, SynchronizationPolicy); 4] = [
    ("auto", SynchronizationPolicy::Auto),
    ("spin", SynchronizationPolicy::Spin),
    ("yield", SynchronizationPolicy::Yield),
    ("blocking_sync", SynchronizationPolicy::BlockingSync),
];

const DOMAINS: [(&str, MemSyncDomain); 2] = [("default", MemSyncDomain::Default), ("remote", MemSyncDomain::Remote)];

const PROPERTIES: [(&str, AccessProperty); 3] = [
    ("normal", AccessProperty::Normal),
    ("streaming", AccessProperty::Streaming),
    ("persisting", AccessProperty::Persisting),
];

#[pymethods]
impl StreamAttributesPy {
    /// How other libraries' threads wait for the stream in the driver; `None` if it was never set.
    #[getter]
    fn synchronization_policy(&self, py: Python<'_>) -> PyResult<Option<&'static str>> {
        let policy = call(py, |api| self.0.synchronization_policy(api))?;
        Ok(policy.map(|policy| name_of(&policy, &POLICIES)))
    }

    #[setter]
    fn set_synchronization_policy(&self, py: Python<'_>, policy: &str) -> PyResult<()> {
        let policy = by_name("synchronization_policy", policy, &POLICIES).py(py)?;
        call(py, |api| self.0.set_synchronization_policy(api, policy))
    }

    /// The priority of work; the driver clamps it to `device.priority_range`.
    #[getter]
    fn priority(&self, py: Python<'_>) -> PyResult<i32> {
        call(py, |api| self.0.priority_attribute(api))
    }

    #[setter]
    fn set_priority(&self, py: Python<'_>, priority: i64) -> PyResult<()> {
        call(py, |api| self.0.set_priority_attribute(api, super::stream::clamped(priority)))
    }

    /// The memory synchronization domain.
    #[getter]
    fn mem_sync_domain(&self, py: Python<'_>) -> PyResult<&'static str> {
        Ok(name_of(&call(py, |api| self.0.mem_sync_domain(api))?, &DOMAINS))
    }

    #[setter]
    fn set_mem_sync_domain(&self, py: Python<'_>, domain: &str) -> PyResult<()> {
        let domain = by_name("mem_sync_domain", domain, &DOMAINS).py(py)?;
        call(py, |api| self.0.set_mem_sync_domain(api, domain))
    }

    /// The physical domains of `"default"` and `"remote"`, each below the device's `mem_sync_domain_count`.
    #[getter]
    fn mem_sync_domain_map(&self, py: Python<'_>) -> PyResult<(u8, u8)> {
        let map = call(py, |api| self.0.mem_sync_domain_map(api))?;
        Ok((map.default, map.remote))
    }

    #[setter]
    fn set_mem_sync_domain_map(&self, py: Python<'_>, map: (i64, i64)) -> PyResult<()> {
        let domain = |value: i64| {
            u8::try_from(value).map_err(|_| Error::invalid(format!("{value} is no memory synchronization domain")))
        };
        let map = MemSyncDomainMap { default: domain(map.0).py(py)?, remote: domain(map.1).py(py)? };
        call(py, |api| self.0.set_mem_sync_domain_map(api, map))
    }

    /// The range of addresses with properties in the L2 cache; `None` may be assigned for no window.
    ///
    /// The driver may align its base and round its size.
    #[getter]
    fn access_policy_window<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        static CLASS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let window = call(py, |api| self.0.access_policy_window(api))?;
        let (hit, miss) = (name_of(&window.hit, &PROPERTIES), name_of(&window.miss, &PROPERTIES));
        CLASS.import(py, "rstream._attributes", "AccessPolicyWindow")?.call1((
            window.base,
            window.bytes,
            window.hit_ratio,
            hit,
            miss,
        ))
    }

    #[setter]
    fn set_access_policy_window(
        &self,
        py: Python<'_>,
        window: Option<(u64, usize, f32, String, String)>,
    ) -> PyResult<()> {
        let window = match window {
            None => AccessPolicyWindow::default(),
            Some((base, bytes, hit_ratio, hit, miss)) => AccessPolicyWindow {
                base,
                bytes,
                hit_ratio,
                hit: by_name("hit", &hit, &PROPERTIES).py(py)?,
                miss: by_name("miss", &miss, &PROPERTIES).py(py)?,
            },
        };
        call(py, |api| self.0.set_access_policy_window(api, window))
    }

    fn __repr__(&self) -> String {
        format!("<rstream.StreamAttributes of stream {}>", self.0.id())
    }
}
