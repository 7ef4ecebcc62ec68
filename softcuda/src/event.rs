//! Events.

use std::ffi::c_uint;
use std::sync::Arc;

use cudarc::driver::sys::{CUevent, CUstream};

use crate::graph::NodeWork;
use crate::system::{
    self, Answer, CAPTURED_EVENT, EventState, ILLEGAL_STATE, INVALID_HANDLE, INVALID_VALUE, NOT_READY, Place,
};
use crate::{call, call_outside, device, put, stream};

/// Of a record or a wait: a node of its own in a capture.
pub(crate) const EXTERNAL: c_uint = 1;
const DISABLE_TIMING: c_uint = 2;
const INTERPROCESS: c_uint = 4;

pub unsafe extern "C" fn cuEventCreate(out: *mut CUevent, flags: c_uint) -> c_uint {
    call_outside("cuEventCreate", || {
        let alone = flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0;
        if out.is_null() || flags > 7 || alone {
            return Err(INVALID_VALUE);
        }
        let context = device::current()?;
        let _submission = system::submission(context);
        let mut system = system::lock();
        system.sound(context)?;
        let handle = system::fresh_handle();
        system.events.insert(handle, EventState { context, flags, place: None, captured: None });
        // SAFETY: the caller's promise.
        unsafe { put(out, handle as CUevent) }
    })
}

pub unsafe extern "C" fn cuEventDestroy_v2(event: CUevent) -> c_uint {
    call("cuEventDestroy_v2", || {
        let context = system::lock().events.get(&(event as usize)).ok_or(INVALID_HANDLE)?.context;
        let _submission = system::submission(context);
        let mut system = system::lock();
        let state = system.events.remove(&(event as usize)).ok_or(INVALID_HANDLE)?;
        system.sound(state.context)
    })
}

pub unsafe extern "C" fn cuEventRecord(event: CUevent, stream: CUstream) -> c_uint {
    call("cuEventRecord", || record(event, stream))
}

pub unsafe extern "C" fn cuEventRecordWithFlags(event: CUevent, stream: CUstream, flags: c_uint) -> c_uint {
    call("cuEventRecordWithFlags", || match flags {
        0 => record(event, stream),
        EXTERNAL => {
            let id = stream::resolve(stream)?;
            let mut system = system::lock();
            if !system.is_member(id) {
                return Err(ILLEGAL_STATE);
            }
            let event = event as usize;
            if !system.events.contains_key(&event) {
                return Err(INVALID_HANDLE);
            }
            system.capture_node(id, NodeWork::Record(event))
        }
        _ => Err(INVALID_VALUE),
    })
}

fn record(event: CUevent, stream: CUstream) -> Answer {
    let id = stream::resolve(stream)?;
    let place = Arc::new(Place::default());
    {
        let mut system = system::lock();
        system.respect_legacy(id)?;
        let state = system.events.get(&(event as usize)).ok_or(INVALID_HANDLE)?;
        if state.context != system.streams.get(&id).ok_or(INVALID_HANDLE)?.context {
            return Err(INVALID_HANDLE);
        }
        if system.is_member(id) {
            return system.capture_event(event as usize, id);
        }
    }
    system::mark(id, Vec::new(), Some(Arc::clone(&place)))?;
    if let Some(state) = system::lock().events.get_mut(&(event as usize)) {
        state.place = Some(place);
        state.captured = None;
    }
    Ok(())
}

pub unsafe extern "C" fn cuEventQuery(event: CUevent) -> c_uint {
    call("cuEventQuery", || {
        let mut system = system::lock();
        system.ask_event(event as usize)?;
        let state = system.events.get(&(event as usize)).ok_or(INVALID_HANDLE)?;
        system.sound(state.context)?;
        if state.place.as_ref().is_none_or(|place| place.is_done()) { Ok(()) } else { Err(NOT_READY) }
    })
}

pub unsafe extern "C" fn cuEventSynchronize(event: CUevent) -> c_uint {
    call_outside("cuEventSynchronize", || {
        let mut system = system::lock();
        system.ask_event(event as usize)?;
        let state = system.events.get(&(event as usize)).ok_or(INVALID_HANDLE)?;
        let (context, place) = (state.context, state.place.clone());
        let system = system::wait_until(system, |system| {
            system.sound(context).is_err() || place.as_ref().is_none_or(|place| place.is_done())
        });
        system.sound(context)
    })
}

pub unsafe extern "C" fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: CUevent, end: CUevent) -> c_uint {
    call_outside("cuEventElapsedTime_v2", || {
        if milliseconds.is_null() {
            // Not an invalid value (measured).
            return Err(INVALID_HANDLE);
        }
        let system = system::lock();
        let place = |event: CUevent| {
            let state = system.events.get(&(event as usize)).filter(|state| state.flags & DISABLE_TIMING == 0);
            let state = state.ok_or(INVALID_HANDLE)?;
            if state.captured.as_ref().is_some_and(|&(capture, _)| system.is_active(capture)) {
                return Err(CAPTURED_EVENT);
            }
            Ok((state.context, state.place.clone().ok_or(INVALID_HANDLE)?))
        };
        let ((context, start), (other, end)) = (place(start)?, place(end)?);
        if context != other {
            return Err(INVALID_HANDLE);
        }
        let (Some(start), Some(end)) = (start.time.get(), end.time.get()) else { return Err(NOT_READY) };
        let elapsed = if end >= start {
            end.duration_since(*start).as_secs_f32()
        } else {
            -start.duration_since(*end).as_secs_f32()
        };
        // SAFETY: the caller's promise.
        unsafe { put(milliseconds, elapsed * 1e3) }
    })
}
