//! A result is moved out once.
use rstream::Completion;

fn take_twice(completion: Completion<u32>) {
    let _ = completion.into_result(None);
    let _ = completion.into_result(None);
}

fn main() {}
