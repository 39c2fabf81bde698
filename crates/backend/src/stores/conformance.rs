//! What every object store must do, whatever it is made of. Runs over a place of its own: it
//! deletes what is there.
//!
//! Each rule is a function that returns the first thing that is wrong.

use bytes::Bytes;

use super::{Client, Condition, LIST_MAX, StoreError};

/// A large object: larger than a packet, a stripe, or what a gateway keeps in one piece.
const LARGE_BYTES: usize = 9 << 20;
/// Rounds of the race, and racers in each.
const ROUNDS: usize = 12;
const RACERS: usize = 8;

type Checked = Result<(), String>;

fn same<T: PartialEq + std::fmt::Debug>(what: &str, found: T, expected: T) -> Checked {
    if found == expected {
        return Ok(());
    }
    Err(format!("{what}: found {found:?}, expected {expected:?}"))
}

fn failed(what: &str) -> impl Fn(StoreError) -> String {
    move |error| format!("{what}: {error}")
}

/// Bytes that tell where they belong.
fn content(seed: u64, bytes: usize) -> Bytes {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut made = Vec::with_capacity(bytes + 8);
    while made.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        made.extend_from_slice(&state.to_le_bytes());
    }
    made.truncate(bytes);
    made.into()
}

/// The suite; what it saw, line by line.
pub async fn conformance(client: &Client) -> Result<Vec<String>, String> {
    clear(client).await?;
    let mut seen = Vec::new();
    let mut passed = |rule: &str| seen.push(format!("{rule}: ok"));
    puts_and_gets(client).await?;
    passed("what was put is got, whole and in parts");
    conditions_hold(client).await?;
    passed("a conditional put makes, and never replaces");
    races_have_one_winner(client).await?;
    passed("of conditional puts that race, one wins");
    deletes(client).await?;
    passed("what was deleted is gone, and may be deleted again");
    large_objects(client).await?;
    passed("large objects come back");
    lists_in_order(client).await?;
    passed("listings are complete, in order, and in pages");
    clear(client).await?;
    Ok(seen)
}

async fn clear(client: &Client) -> Checked {
    loop {
        let page = client
            .list("", "", LIST_MAX)
            .await
            .map_err(failed("list"))?;
        for object in &page.objects {
            let deleted = client.delete(&object.name).await;
            deleted.map_err(failed("delete"))?;
        }
        if !page.more {
            return Ok(());
        }
    }
}

async fn puts_and_gets(client: &Client) -> Checked {
    let put = failed("put");
    let get = failed("get");
    for (number, bytes) in [1usize, 511, 4096, 70_000].into_iter().enumerate() {
        let name = format!("data/{number:020}");
        let data = content(number as u64, bytes);
        let done = client.put(&name, data.clone(), Condition::Always).await;
        done.map_err(&put)?;
        for (offset, length) in [(0, bytes), (bytes / 2, bytes - bytes / 2), (bytes - 1, 1)] {
            let got = client.get(&name, offset as u64, length).await;
            let got = got.map_err(&get)?;
            if got != data.slice(offset..offset + length) {
                return Err(format!(
                    "get {name}, {length} bytes at {offset}: other bytes"
                ));
            }
        }
        let beyond = client.get(&name, bytes as u64 - 1, 2).await;
        same("a get beyond the end", beyond, Err(StoreError::Short))?;
    }
    let name = "data/00000000000000000000";
    let data = content(99, 3000);
    let done = client.put(name, data.clone(), Condition::Always).await;
    done.map_err(&put)?;
    let got = client.get(name, 0, 3000).await.map_err(&get)?;
    same("an object that was replaced", got, data)?;
    let absent = client.get("data/absent", 0, 1).await;
    same("get what is not there", absent, Err(StoreError::NotFound))
}

async fn conditions_hold(client: &Client) -> Checked {
    let name = "manifest/00000000000000000001";
    let first = content(1, 4096);
    let made = client.put(name, first.clone(), Condition::IfAbsent).await;
    same("a conditional put of a new name", made, Ok(()))?;
    for data in [content(2, 8192), first.clone()] {
        let refused = client.put(name, data, Condition::IfAbsent).await;
        let exists = Err(StoreError::Exists);
        same("a conditional put of a taken name", refused, exists)?;
    }
    let got = client.get(name, 0, 4096).await.map_err(failed("get"))?;
    same("what a refused put left", got, first)?;
    client.delete(name).await.map_err(failed("delete"))?;
    let made = client.put(name, content(3, 10), Condition::IfAbsent).await;
    same("a conditional put of a deleted name", made, Ok(()))
}

async fn races_have_one_winner(client: &Client) -> Checked {
    for round in 0..ROUNDS {
        let name = format!("manifest/{:020}", 1000 + round);
        // Large enough that their transfers overlap.
        let racers: Vec<_> = (0..RACERS)
            .map(|racer| {
                let (client, name) = (client.clone(), name.clone());
                tokio::spawn(async move {
                    let data = content(racer as u64, 60_000);
                    client.put(&name, data, Condition::IfAbsent).await
                })
            })
            .collect();
        let mut winners = Vec::new();
        for (racer, task) in racers.into_iter().enumerate() {
            match task.await.map_err(|error| error.to_string())? {
                Ok(()) => winners.push(racer),
                Err(StoreError::Exists) => {}
                Err(error) => return Err(format!("round {round}: racer {racer}: {error}")),
            }
        }
        let [winner] = winners[..] else {
            return Err(format!("round {round}: {winners:?} all created {name}"));
        };
        let got = client.get(&name, 0, 60_000).await.map_err(failed("get"))?;
        if got != content(winner as u64, 60_000) {
            return Err(format!("round {round}: {name} is not what its winner put"));
        }
    }
    Ok(())
}

async fn deletes(client: &Client) -> Checked {
    let name = "data/00000000000000000003";
    for _ in 0..2 {
        client.delete(name).await.map_err(failed("delete"))?;
        let gone = client.get(name, 0, 1).await;
        same("get what was deleted", gone, Err(StoreError::NotFound))?;
    }
    Ok(())
}

async fn large_objects(client: &Client) -> Checked {
    for (number, condition) in [(7000, Condition::Always), (7001, Condition::IfAbsent)] {
        let name = format!("data/{number:020}");
        let data = content(number, LARGE_BYTES);
        let done = client.put(&name, data.clone(), condition).await;
        done.map_err(failed("put a large object"))?;
        for (offset, bytes) in [(0, LARGE_BYTES), ((4 << 20) - 100, 4096)] {
            let got = client.get(&name, offset as u64, bytes).await;
            let got = got.map_err(failed("get of a large object"))?;
            if got != data.slice(offset..offset + bytes) {
                return Err(format!(
                    "{bytes} bytes at {offset} of a large object differ"
                ));
            }
        }
    }
    Ok(())
}

async fn lists_in_order(client: &Client) -> Checked {
    clear(client).await?;
    let empty = client.list("map/", "", 10).await;
    same("a listing of nothing", empty, Ok(super::Listing::default()))?;
    let mut expected = Vec::new();
    for number in [5u64, 3, 10, 1, 9, 11, 2] {
        let name = format!("map/{number:020}");
        let data = content(number, number as usize);
        let done = client.put(&name, data, Condition::Always).await;
        done.map_err(failed("put"))?;
        expected.push((name, number));
    }
    for other in ["data/00000000000000000001", "snapshot/a"] {
        let done = client.put(other, content(0, 1), Condition::Always).await;
        done.map_err(failed("put"))?;
    }
    expected.sort();
    for max in [2, 3, 7, LIST_MAX] {
        let (mut found, mut after) = (Vec::new(), String::new());
        loop {
            let page = client.list("map/", &after, max).await;
            let page = page.map_err(failed("list"))?;
            if page.objects.len() > max || page.more && page.objects.is_empty() {
                return Err(format!("a page of {} where {max} fit", page.objects.len()));
            }
            let page_found = page.objects.into_iter();
            found.extend(page_found.map(|object| (object.name, object.bytes)));
            match found.last() {
                Some((last, _)) if page.more => after.clone_from(last),
                _ => break,
            }
        }
        same(&format!("a listing in pages of {max}"), &found, &expected)?;
    }
    let all = client
        .list("", "", LIST_MAX)
        .await
        .map_err(failed("list"))?;
    let names: Vec<&str> = all
        .objects
        .iter()
        .map(|object| object.name.as_str())
        .collect();
    same("the number of all names", names.len(), expected.len() + 2)?;
    if names.is_sorted() {
        return Ok(());
    }
    Err(format!("names out of order: {names:?}"))
}
