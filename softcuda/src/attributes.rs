//! Stream attributes. They are kept and checked; nothing on this device acts on them.

use std::ffi::{c_int, c_uint};

use cudarc::driver::sys::{CUstream, CUstreamAttrValue};

use crate::call;
use crate::device::{MEM_SYNC_DOMAINS, MOST_WINDOW_BYTES, PRIORITIES};
use crate::stream::{look, resolve};
use crate::system::{self, Answer, INVALID_HANDLE, INVALID_VALUE, StreamState};

const ACCESS_POLICY_WINDOW: c_uint = 1;
const SYNCHRONIZATION_POLICY: c_uint = 3;
const PRIORITY: c_uint = 8;
const MEM_SYNC_DOMAIN_MAP: c_uint = 9;
const MEM_SYNC_DOMAIN: c_uint = 10;

/// `CUaccessPolicyWindow` with its enums as integers.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Window {
    base: u64,
    bytes: usize,
    hit_ratio: f32,
    hit: u32,
    miss: u32,
}

/// The attributes of a stream but for its priority.
#[derive(Clone, Copy)]
pub(crate) struct Attributes {
    window: Window,
    policy: u32,
    domains: [u8; 2],
    domain: u32,
}

impl Default for Attributes {
    fn default() -> Attributes {
        // A policy that was never set reads as no value of the enum (measured).
        Attributes { window: Window::default(), policy: u32::MAX, domains: [0, 1], domain: 0 }
    }
}

pub unsafe extern "C" fn cuStreamGetAttribute(
    stream: CUstream,
    attribute: c_uint,
    value: *mut CUstreamAttrValue,
) -> c_uint {
    call("cuStreamGetAttribute", || {
        let (attributes, priority) = look(stream, |_, state| (state.attributes, state.priority))?;
        // SAFETY: NULL, or room for the union, of which every member starts at offset 0: the caller's promise.
        unsafe {
            match attribute {
                ACCESS_POLICY_WINDOW => crate::put(value.cast(), attributes.window),
                SYNCHRONIZATION_POLICY => crate::put(value.cast(), attributes.policy),
                PRIORITY => crate::put(value.cast(), priority),
                MEM_SYNC_DOMAIN_MAP => crate::put(value.cast(), attributes.domains),
                MEM_SYNC_DOMAIN => crate::put(value.cast(), attributes.domain),
                _ => Err(INVALID_VALUE),
            }
        }
    })
}

pub unsafe extern "C" fn cuStreamSetAttribute(
    stream: CUstream,
    attribute: c_uint,
    value: *const CUstreamAttrValue,
) -> c_uint {
    call("cuStreamSetAttribute", || {
        look(stream, |_, _| ())?;
        if value.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the union, with the member of the attribute at offset 0: the caller's promise.
        unsafe {
            match attribute {
                ACCESS_POLICY_WINDOW => {
                    const PERSISTING: u32 = 2;
                    // 3 is no property, and accepted (measured).
                    const LAST: u32 = 3;
                    let window = value.cast::<Window>().read();
                    let good = (0.0..=1.0).contains(&window.hit_ratio)
                        && window.hit <= LAST
                        && window.miss <= LAST
                        && window.miss != PERSISTING
                        && window.bytes <= MOST_WINDOW_BYTES;
                    change(stream, good, |state| state.attributes.window = window)
                }
                SYNCHRONIZATION_POLICY => {
                    let policy = value.cast::<u32>().read();
                    change(stream, (1..=4).contains(&policy), |state| state.attributes.policy = policy)
                }
                PRIORITY => {
                    let priority = value.cast::<c_int>().read().clamp(PRIORITIES.1, PRIORITIES.0);
                    change(stream, true, |state| state.priority = priority)
                }
                MEM_SYNC_DOMAIN_MAP => {
                    let domains = value.cast::<[u8; 2]>().read();
                    let good = domains.iter().all(|&domain| domain < MEM_SYNC_DOMAINS);
                    change(stream, good, |state| state.attributes.domains = domains)
                }
                MEM_SYNC_DOMAIN => {
                    let domain = value.cast::<u32>().read();
                    change(stream, domain <= 1, |state| state.attributes.domain = domain)
                }
                _ => Err(INVALID_VALUE),
            }
        }
    })
}

fn change(stream: CUstream, good: bool, set: impl FnOnce(&mut StreamState)) -> Answer {
    if !good {
        return Err(INVALID_VALUE);
    }
    let id = resolve(stream)?;
    set(system::lock().streams.get_mut(&id).ok_or(INVALID_HANDLE)?);
    Ok(())
}

pub unsafe extern "C" fn cuStreamCopyAttributes(dst: CUstream, src: CUstream) -> c_uint {
    call("cuStreamCopyAttributes", || {
        let (context, attributes, priority) = look(src, |_, state| (state.context, state.attributes, state.priority))?;
        let same = look(dst, |_, state| state.context)? == context;
        change(dst, same, |state| {
            state.attributes = attributes;
            state.priority = priority;
        })
    })
}
