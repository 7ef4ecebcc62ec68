//! Stream attributes: typed access to `cuStreamGetAttribute` and `cuStreamSetAttribute`.
//!
//! An attribute acts on work that is queued after it was set. Reading and setting is allowed while the stream captures.

use std::mem::MaybeUninit;

use cudarc::driver::sys::CUstreamAttrValue;

use crate::api::Api;
use crate::error::{Error, Result};
use crate::stream::Stream;

/// How a thread waits in the driver for a stream (`CUsynchronizationPolicy`). rstream's own waits do not depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SynchronizationPolicy {
    /// The driver chooses.
    Auto,
    /// Spin.
    Spin,
    /// Spin, and yield the processor.
    Yield,
    /// Sleep.
    BlockingSync,
}

/// What becomes of an access in L2 (`CUaccessProperty`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum AccessProperty {
    /// No preference.
    #[default]
    Normal,
    /// Less likely to stay in the cache.
    Streaming,
    /// More likely to stay in the cache.
    Persisting,
}

/// A range of addresses whose accesses have properties in L2 (`CUaccessPolicyWindow`). All zero: none.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct AccessPolicyWindow {
    /// The first address.
    pub base: u64,
    /// The size in bytes; 0 turns the window off.
    pub bytes: usize,
    /// The share of accesses that get `hit`, 0 to 1; the others get `miss`.
    pub hit_ratio: f32,
    /// For hits.
    pub hit: AccessProperty,
    /// For misses; not [`AccessProperty::Persisting`].
    pub miss: AccessProperty,
}

/// A memory synchronization domain (`CUlaunchMemSyncDomain`): fences of one do not wait for writes of the other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum MemSyncDomain {
    /// For ordinary work.
    #[default]
    Default,
    /// For work that communicates with other devices.
    Remote,
}

/// Which physical domain each logical one is (`CUlaunchMemSyncDomainMap`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MemSyncDomainMap {
    /// Of [`MemSyncDomain::Default`].
    pub default: u8,
    /// Of [`MemSyncDomain::Remote`].
    pub remote: u8,
}

const ACCESS_POLICY_WINDOW: u32 = 1;
const SYNCHRONIZATION_POLICY: u32 = 3;
const PRIORITY: u32 = 8;
const MEM_SYNC_DOMAIN_MAP: u32 = 9;
const MEM_SYNC_DOMAIN: u32 = 10;

/// `CUaccessPolicyWindow` with its enums as the integers that they are in C.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawWindow {
    base: u64,
    bytes: usize,
    hit_ratio: f32,
    hit: u32,
    miss: u32,
}

impl AccessProperty {
    const ALL: [AccessProperty; 3] = [AccessProperty::Normal, AccessProperty::Streaming, AccessProperty::Persisting];

    fn of(code: u32) -> AccessProperty {
        AccessProperty::ALL.get(code as usize).copied().unwrap_or_default()
    }
}

impl Stream {
    /// # Safety
    /// `T` is the type of the attribute's member of the union, or integers in place of its enums.
    unsafe fn attribute<T: Copy>(&self, api: &Api<'_>, attribute: u32) -> Result<T> {
        const { assert!(size_of::<T>() <= size_of::<CUstreamAttrValue>()) };
        let ready = self.alive(api)?;
        // All members are at the start; what the driver does not write stays zero.
        let mut value = MaybeUninit::<CUstreamAttrValue>::zeroed();
        // SAFETY: the stream is alive; the driver writes one member of the union, which fits. Every member starts at
        // offset 0, so the value can be read as it (the caller's promise); all bytes are initialized.
        unsafe {
            self.device().driver().cuStreamGetAttribute(ready.handle(), attribute, value.as_mut_ptr())?;
            Ok(value.as_ptr().cast::<T>().read())
        }
    }

    /// # Safety
    /// As [`Stream::attribute`].
    unsafe fn set_attribute<T: Copy>(&self, api: &Api<'_>, attribute: u32, member: T) -> Result<()> {
        const { assert!(size_of::<T>() <= size_of::<CUstreamAttrValue>()) };
        let ready = self.alive(api)?;
        let mut value = MaybeUninit::<CUstreamAttrValue>::zeroed();
        // SAFETY: the member fits, at the start of the union; the rest is zero. The stream is alive.
        unsafe {
            value.as_mut_ptr().cast::<T>().write(member);
            self.device().driver().cuStreamSetAttribute(ready.handle(), attribute, value.as_ptr())
        }
    }

    /// How threads wait for it in the driver; `None` when it was never set: then the context's flags say.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn synchronization_policy(&self, api: &Api<'_>) -> Result<Option<SynchronizationPolicy>> {
        // SAFETY: the member is an enum of C's int size.
        Ok(match unsafe { self.attribute::<u32>(api, SYNCHRONIZATION_POLICY) }? {
            1 => Some(SynchronizationPolicy::Auto),
            2 => Some(SynchronizationPolicy::Spin),
            3 => Some(SynchronizationPolicy::Yield),
            4 => Some(SynchronizationPolicy::BlockingSync),
            _ => None,
        })
    }

    /// Sets how threads wait for it in the driver.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn set_synchronization_policy(&self, api: &Api<'_>, policy: SynchronizationPolicy) -> Result<()> {
        let code: u32 = match policy {
            SynchronizationPolicy::Auto => 1,
            SynchronizationPolicy::Spin => 2,
            SynchronizationPolicy::Yield => 3,
            SynchronizationPolicy::BlockingSync => 4,
        };
        // SAFETY: the member is an enum of C's int size.
        unsafe { self.set_attribute(api, SYNCHRONIZATION_POLICY, code) }
    }

    /// The priority that work queued from now on has.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn priority_attribute(&self, api: &Api<'_>) -> Result<i32> {
        // SAFETY: the member is an int.
        unsafe { self.attribute(api, PRIORITY) }
    }

    /// Sets the priority of work that is queued from now on. The driver clamps it.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn set_priority_attribute(&self, api: &Api<'_>, priority: i32) -> Result<()> {
        // SAFETY: the member is an int.
        unsafe { self.set_attribute(api, PRIORITY, priority) }?;
        self.priority_changed(self.priority_attribute(api)?);
        Ok(())
    }

    /// Its memory synchronization domain.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn mem_sync_domain(&self, api: &Api<'_>) -> Result<MemSyncDomain> {
        // SAFETY: the member is an enum of C's int size.
        let code = unsafe { self.attribute::<u32>(api, MEM_SYNC_DOMAIN) }?;
        Ok(if code == 1 { MemSyncDomain::Remote } else { MemSyncDomain::Default })
    }

    /// Sets its memory synchronization domain.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn set_mem_sync_domain(&self, api: &Api<'_>, domain: MemSyncDomain) -> Result<()> {
        // SAFETY: the member is an enum of C's int size.
        unsafe { self.set_attribute(api, MEM_SYNC_DOMAIN, u32::from(domain == MemSyncDomain::Remote)) }
    }

    /// Which physical memory synchronization domains its logical ones are.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn mem_sync_domain_map(&self, api: &Api<'_>) -> Result<MemSyncDomainMap> {
        // SAFETY: the member is a struct of two bytes.
        let [default, remote] = unsafe { self.attribute::<[u8; 2]>(api, MEM_SYNC_DOMAIN_MAP) }?;
        Ok(MemSyncDomainMap { default, remote })
    }

    /// Sets which physical memory synchronization domains its logical ones are.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for a domain that the device does not have; what the driver answers.
    pub fn set_mem_sync_domain_map(&self, api: &Api<'_>, map: MemSyncDomainMap) -> Result<()> {
        const COUNT: u32 = 126;
        let count = self.device().attribute(api, COUNT)?;
        if [map.default, map.remote].iter().any(|&domain| i32::from(domain) >= count) {
            return Err(Error::invalid(format!(
                "memory synchronization domains {} and {}: the device has {count}",
                map.default, map.remote
            )));
        }
        // SAFETY: the member is a struct of two bytes.
        unsafe { self.set_attribute(api, MEM_SYNC_DOMAIN_MAP, [map.default, map.remote]) }
    }

    /// Its access policy window.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn access_policy_window(&self, api: &Api<'_>) -> Result<AccessPolicyWindow> {
        // SAFETY: `RawWindow` is the member with integers in place of its enums.
        let raw = unsafe { self.attribute::<RawWindow>(api, ACCESS_POLICY_WINDOW) }?;
        Ok(AccessPolicyWindow {
            base: raw.base,
            bytes: raw.bytes,
            hit_ratio: raw.hit_ratio,
            hit: AccessProperty::of(raw.hit),
            miss: AccessProperty::of(raw.miss),
        })
    }

    /// Sets its access policy window. The driver may align the base and round the size.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for a ratio outside of 0 to 1, for misses that persist, and for a window larger than the
    /// device's `max_access_policy_window_size`; what the driver answers.
    pub fn set_access_policy_window(&self, api: &Api<'_>, window: AccessPolicyWindow) -> Result<()> {
        const MOST_BYTES: u32 = 109;
        if !(0.0..=1.0).contains(&window.hit_ratio) {
            return Err(Error::invalid(format!("hit_ratio {}: expected 0 to 1", window.hit_ratio)));
        }
        if window.miss == AccessProperty::Persisting {
            return Err(Error::invalid("misses of an access policy window cannot persist"));
        }
        let most = usize::try_from(self.device().attribute(api, MOST_BYTES)?).unwrap_or(0);
        if window.bytes > most {
            return Err(Error::invalid(format!("a window of {} bytes: the device allows {most}", window.bytes)));
        }
        let raw = RawWindow {
            base: window.base,
            bytes: window.bytes,
            hit_ratio: window.hit_ratio,
            hit: window.hit as u32,
            miss: window.miss as u32,
        };
        // SAFETY: `RawWindow` is the member with integers in place of its enums.
        unsafe { self.set_attribute(api, ACCESS_POLICY_WINDOW, raw) }
    }

    /// Takes over all attributes of `from`, its priority included (`cuStreamCopyAttributes`).
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for a stream of another device; what the driver answers.
    pub fn copy_attributes(&self, api: &Api<'_>, from: &Stream) -> Result<()> {
        if from.device() != self.device() {
            return Err(Error::invalid(format!(
                "attributes of a stream of device {} cannot be those of one of device {}",
                from.device(),
                self.device()
            )));
        }
        {
            let (dst, src) = (self.alive(api)?, from.alive(api)?);
            // SAFETY: both streams are alive and of one context.
            unsafe { self.device().driver().cuStreamCopyAttributes(dst.handle(), src.handle()) }?;
        }
        self.priority_changed(self.priority_attribute(api)?);
        Ok(())
    }
}
