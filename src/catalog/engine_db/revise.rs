//! Makes `engine.db` equal to a list of entries, and writes only what differs from it.

use std::collections::{HashMap, HashSet};

use super::rows::{Due, delete, digest, put, put_info, replace_jobs, replace_missed};
use super::{Applied, EngineDb, EngineInfo, Entry, EntryHead, Totals};
use crate::catalog::error::CatalogError;
use crate::catalog::sqlite::Result;

impl EngineDb {
    /// Makes the entries equal to `wanted` in one transaction; in none if nothing differs. `body` reads an entry that
    /// differs. No uncaptured entries and no background jobs remain.
    ///
    /// # Errors
    /// As [`Self::apply`]; the first error of `body`; `Corrupt` if what it read has another digest or size. Nothing
    /// is changed then.
    pub fn revise(
        &self,
        info: &EngineInfo,
        wanted: &[EntryHead],
        mut body: impl FnMut(&EntryHead) -> Result<Vec<u8>>,
    ) -> Result<Applied> {
        let bytes = wanted.iter().fold(0, |sum: u64, head| sum.saturating_add(head.size));
        let totals = Totals { entries: wanted.len() as u64, bytes };
        totals.check(self.most_bytes)?;
        let found = self.heads()?;
        let named: HashSet<&str> = wanted.iter().map(|head| head.key.as_str()).collect();
        let gone: Vec<String> =
            found.iter().filter(|head| !named.contains(head.key.as_str())).map(|head| head.key.clone()).collect();
        let found: HashMap<&str, &EntryHead> = found.iter().map(|head| (head.key.as_str(), head)).collect();
        let differs = |head: &&EntryHead| !found.get(head.key.as_str()).is_some_and(|before| is_same(before, head));
        let due: Vec<&EntryHead> = wanted.iter().filter(differs).collect();
        let lists = !self.missed()?.is_empty() || !self.jobs()?.is_empty();
        let applied = Applied { puts: due.len(), dels: gone.len(), lists };
        if applied == Applied::default() && self.info()?.as_ref() == Some(info) {
            return Ok(applied);
        }
        let gone = self.present(&gone)?;
        self.totals.set(None);
        self.db.transaction("engine.state.revise", |db| {
            delete(db, &gone)?;
            for head in due {
                let entry = Entry { key: head.key.clone(), meta_json: head.meta_json.clone(), body: body(head)? };
                if entry.body.len() as u64 != head.size || digest(&entry.body) != head.digest {
                    return Err(self.wrong(&format!("the new body of entry {:?} is another one", head.key)));
                }
                let before = self.before(&head.key)?.map(|(before, ..)| before);
                put(db, &Due { digest: head.digest, entry: &entry, before }, 0)?;
            }
            replace_missed(db, &[])?;
            replace_jobs(db, &[])?;
            put_info(db, info)?;
            let written = self.heads()?;
            match written.len() == wanted.len() && written.iter().zip(wanted).all(|(is, due)| is_same(is, due)) {
                true => Ok(()),
                false => Err(self.wrong("its entries are not those of the list")),
            }
        })?;
        self.totals.set(Some(totals));
        Ok(applied)
    }

    fn wrong(&self, why: &str) -> CatalogError {
        CatalogError::Corrupt { path: self.db.path().to_owned(), why: why.into() }
    }
}

fn is_same(one: &EntryHead, other: &EntryHead) -> bool {
    let EntryHead { key, meta_json, digest, size, exec: _ } = one;
    *key == other.key && *meta_json == other.meta_json && *digest == other.digest && *size == other.size
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::catalog::{Changes, JobRecord};
    use crate::core::durability::Durability;
    use crate::core::limits;

    const LARGE: usize = 2 * limits::FRAME_TAIL_BYTES + 1;

    fn entry(key: &str, byte: u8, size: usize) -> Entry {
        Entry { key: key.into(), meta_json: "{}".into(), body: vec![byte; size] }
    }

    fn head(entry: &Entry) -> EntryHead {
        let (digest, size) = (digest(&entry.body), entry.body.len() as u64);
        EntryHead { key: entry.key.clone(), meta_json: entry.meta_json.clone(), digest, size, exec: 0 }
    }

    fn info() -> EngineInfo {
        EngineInfo { name: "python".into(), version: String::new(), format: 1 }
    }

    /// Revises to these entries; returns the keys whose bodies were read.
    fn revised(db: &EngineDb, entries: &[Entry]) -> Result<Vec<String>> {
        let (heads, read): (Vec<EntryHead>, _) = (entries.iter().map(head).collect(), RefCell::default());
        let read_body = |head: &EntryHead| {
            RefCell::<Vec<String>>::borrow_mut(&read).push(head.key.clone());
            Ok(entries.iter().find(|entry| entry.key == head.key).expect("it is asked for").body.clone())
        };
        db.revise(&info(), &heads, read_body)?;
        Ok(read.take())
    }

    fn all(db: &EngineDb) -> Vec<Entry> {
        let heads = db.heads().expect("readable");
        heads.iter().map(|head| db.entry(&head.key).expect("sound").expect("it is there")).collect()
    }

    #[test]
    fn revision_writes_only_differences() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let db = EngineDb::open(&dir.path().join("engine.db"), Durability::Process).expect("made");
        let first = [entry("var/a", 1, 5), entry("var/b", 2, LARGE), entry("var/c", 3, LARGE), entry("var/d", 4, 0)];
        assert_eq!(revised(&db, &first).expect("written").len(), 4);
        assert_eq!((all(&db), db.info().expect("readable")), (first.to_vec(), Some(info())));
        let jobs = Some(vec![JobRecord { id: "1".into(), command: "sleep 60".into() }]);
        db.apply(&Changes { jobs, ..Changes::default() }).expect("stored");
        // One stays, one shrinks, one goes, one changes its meta object, and one is new.
        let second = [
            entry("var/b", 2, LARGE),
            entry("var/c", 5, 7),
            Entry { meta_json: r#"{"type":"x"}"#.into(), ..entry("var/d", 4, 0) },
            entry("var/e", 6, LARGE),
        ];
        assert_eq!(revised(&db, &second).expect("written"), ["var/c", "var/d", "var/e"]);
        assert_eq!((all(&db), db.jobs().expect("readable")), (second.to_vec(), Vec::new()));
        assert!(revised(&db, &second).expect("nothing differs").is_empty());
        // Another engine's state has the same entries, at least in name.
        let other = EngineInfo { name: "kaish".into(), ..info() };
        db.revise(&other, &second.each_ref().map(head), |_| unreachable!("no body differs")).expect("written");
        assert_eq!(db.info().expect("readable"), Some(other));
        db.check().expect("sound");
        assert!(revised(&db, &[]).expect("emptied").is_empty());
        assert_eq!(all(&db), []);
    }

    #[test]
    fn wrong_bodies_change_nothing() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let db = EngineDb::open(&dir.path().join("engine.db"), Durability::Process).expect("made").bounded(100);
        let first = [entry("var/a", 1, 5), entry("var/b", 2, 6)];
        revised(&db, &first).expect("written");
        let wanted = [entry("var/b", 3, 6), entry("var/c", 4, 7)].each_ref().map(head);
        for body in [vec![9; 6], vec![3; 5]] {
            let error = db.revise(&info(), &wanted, |_| Ok(body.clone())).expect_err("another body");
            assert!(matches!(error, CatalogError::Corrupt { .. }), "{error}");
            assert_eq!(all(&db), first);
        }
        db.revise(&info(), &wanted, |_| Err(CatalogError::Busy)).expect_err("it cannot be read");
        let twice = [head(&first[0]), head(&first[0])];
        db.revise(&info(), &twice, |_| Ok(first[0].body.clone())).expect_err("one key twice");
        let error = revised(&db, &[entry("var/a", 1, 101)]).expect_err("too large");
        assert!(matches!(error, CatalogError::Limit { .. }), "{error}");
        assert_eq!(all(&db), first);
    }
}
