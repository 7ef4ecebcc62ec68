//! The host has attached memory inside a callback, or while no work can be queued with it.
use rstream::{Api, Attached, Pattern};

fn keep(api: &Api<'_>, attached: &mut Attached<'static, u32>) {
    let mut kept: Option<&'static mut [u32]> = None;
    let _ = attached.with(api, move |data| kept = data.ok());
}

fn queue(api: &Api<'_>, attached: &mut Attached<'static, u32>) {
    let data = attached.synchronize(api, None).unwrap();
    let _ = attached.fill(api, Pattern::U32(0));
    data[0] = 1;
}

fn main() {}
