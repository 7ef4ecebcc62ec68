//! Host code at points of a CUDA stream: *the GPU has reached this point: run my code, now, exactly once, safely.*
//!
//! # Promises
//! - **Exactly once.** Host code that was accepted resolves exactly once: it ran, it failed, or its [`Completion`] says
//!   why it could not run. A refused enqueue gives the closure back ([`Refused`]).
//! - **No API calls from callbacks.** Every call that reaches the driver takes an [`Api`], which a callback cannot have.
//! - **Nothing is freed early.** What queued work uses lives until the work is done; dropping a handle is safe anywhere.
//!
//! # Example
//! ```
//! use rstream::{Api, Device, Stream, StreamOptions};
//!
//! Api::attach(|api| {
//!     let stream = Stream::new(api, Device::soft(api, 0)?, StreamOptions::default())?;
//!     // A callback: the stream waits for it, and it gets the status of the work before.
//!     let seen = stream.add_callback(api, |status| status.ok())?;
//!     // A continuation: the stream does not wait, and it may use the API.
//!     let again = stream.clone();
//!     let idle = stream.then(api, move |api| again.query(api))?;
//!     assert!(seen.into_result(None)?);
//!     idle.into_result(None)??;
//!     Ok::<(), rstream::Error>(())
//! })??;
//! # Ok::<(), rstream::Error>(())
//! ```
//!
//! # Modules
//! | module | what it has |
//! | --- | --- |
//! | [`api`] | the token, and which thread may call |
//! | [`device`], [`stream`], [`event`], [`memory`] | the objects |
//! | [`attributes`] | typed attributes of streams |
//! | [`callback`] | the three kinds of host code, and callbacks that are queued many times |
//! | [`capture`], [`graph`] | streams captured into graphs, and graphs made by hand |
//! | [`managed`] | managed memory attached to a stream |
//! | [`green`] | streams on a part of a device |
//! | [`poller`] | the threads of the memory signal, and how they wait |
//! | [`completion`] | their results: blocking, as a `Future`, with hooks |
//! | [`executor`] | worker threads: in order per strand, without one strand holding up another |
//! | [`error`] | codes, and the error type |
//! | [`driver`] | the table of entry points, over `cudarc` and over softcuda |
//! | [`testing`] | device work and faults on demand |

pub mod api;
pub mod attributes;
pub mod callback;
pub mod capture;
pub mod completion;
pub mod device;
mod drawing;
pub mod driver;
pub mod error;
pub mod event;
pub mod executor;
mod gate;
pub mod graph;
pub mod green;
mod lane;
pub mod managed;
pub mod memory;
pub mod poller;
mod reaper;
pub mod stream;
pub mod testing;

#[cfg(feature = "python")]
mod python;

/// The README's example, as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

pub use api::Api;
pub use attributes::{AccessPolicyWindow, AccessProperty, MemSyncDomain, MemSyncDomainMap, SynchronizationPolicy};
pub use callback::{ReusableCallback, Stats, stats};
pub use capture::{Capture, CaptureInfo, CaptureMode, CaptureStatus};
pub use completion::Completion;
pub use device::Device;
pub use error::{Error, Refused, Result, Status};
pub use event::{Event, EventOptions};
pub use graph::{Graph, GraphExec, HostNode, Node, NodeKind};
pub use green::GreenContext;
pub use managed::Attached;
pub use memory::{Attach, Buffer, BufferKind, ManagedAttach, Pattern};
pub use poller::{WaitPolicy, set_wait_policy};
pub use stream::{Signal, Stream, StreamOptions};
