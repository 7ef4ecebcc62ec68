//! A token is valid inside `attach` only.
use rstream::Api;

fn main() {
    let mut kept = None;
    let _ = Api::attach(|api| kept = Some(api));
}
