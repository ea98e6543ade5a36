# ruff: noqa: E501
"""Formats of secrets: what tokens of known providers look like, and where commands take a password.

Source: the prefixes and lengths are facts that the providers publish. Which providers are listed follows the default
rules of gitleaks (https://github.com/gitleaks/gitleaks, file config/gitleaks.toml, MIT License, read on 28 November
2026), with more providers of AI services. The patterns were written for nsa-harness. They accept a token of about half
of the usual length, so that a truncated token is found too. To add a provider, add one line.
"""

from __future__ import annotations

import re

_DIGIT_SOON = r"(?=[A-Za-z]{0,40}(?:[0-9]|[a-z][A-Z]{1,3}[a-z]{0,2}[A-Z]))"  # or no word, at least

# One line for each provider: its name, and the patterns of its tokens. A pattern begins with literal text, which is
# searched first because that is fast, or with other text that each token contains and ">>". If a pattern has a group,
# only the group is secret. `{D}` demands a digit soon, where the prefix could begin an ordinary word.
_PROVIDERS = r"""
1password         A3-[A-Z0-9]{6}-[A-Z0-9-]{20,40} ops_eyJ[A-Za-z0-9+/=_-]{20,4096}
adobe             p8e-[A-Za-z0-9]{24,64}
conda channel     /t/>>/t/([a-z]{2}-[0-9a-f][0-9a-f-]{12,80})/
age               AGE-SECRET-KEY-1[A-Z0-9]{20,80}
airtable          pat[A-Za-z0-9]{14}\.[a-f0-9]{32,64}
alibaba           LTAI[A-Za-z0-9]{12,40}
anyscale          esecret_{D}[A-Za-z0-9]{16,64}
artifactory       AKCp[A-Za-z0-9]{10,128} cmVmd[A-Za-z0-9]{30,128}
asana             /1>>[0-9]/[0-9]{14,18}(?:/[0-9]{14,18})?:[A-Za-z0-9]{32}
atlassian         AT(?:ATT|CTT|BB)[A-Za-z0-9]{1,3}[A-Za-z0-9_=-]{16,400}
aws               AKIA[A-Z0-9]{16}["'][,\x20]{1,3}["']([A-Za-z0-9/+=]{40}) ASIA[A-Z0-9]{16}["'][,\x20]{1,3}["']([A-Za-z0-9/+=]{40}) AKIA[A-Z0-9]{12,64} ASIA[A-Z0-9]{12,64} ABIA[A-Z0-9]{12,64} ACCA[A-Z0-9]{12,64} A3T[A-Z0-9]{13,64} ABSK[A-Za-z0-9+/]{30,400}={0,2}
azure ad          Q~>>[A-Za-z0-9_~.]{3}[0-9]Q~[A-Za-z0-9_~.-]{20,40}
azure devops      JQQJ99>>[A-Za-z0-9]{52}JQQJ99[A-Za-z0-9]{10}AAA[A-Z]{3}[A-Za-z0-9]{8,12}
azure storage     ==>>(?<!sha512-)[A-Za-z0-9+/]{86}==
brevo             xkeysib-[a-f0-9]{30,64}(?:-[A-Za-z0-9]{8,32})?
buildkite         bk(?:ua|at|ct|cp)_{D}[A-Za-z0-9]{20,64}
cerebras          csk-{D}[a-z0-9]{24,64}
circleci          CCIP(?:AT|RJ)_[A-Za-z0-9_]{20,128}
clickhouse        4b1d[A-Za-z0-9]{30,64}
clojars           CLOJARS_[A-Za-z0-9]{30,80}
cloudflare        v1\.0-[a-f0-9]{24}-[a-f0-9]{60,160} cf(?:at|ut|k)_[A-Za-z0-9_-]{30,80}
contentful        CFPAT-[A-Za-z0-9_-]{20,64}
databricks        dapi[a-f0-9]{24,40}(?:-[0-9])? dkea[a-f0-9]{24,40} dose[a-f0-9]{24,40}
deno              ddp_{D}[A-Za-z0-9]{24,64}
digitalocean      do[oprt]_v1_[a-f0-9]{24,80}
discord           .>>[MNO][A-Za-z0-9_-]{22,28}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{24,48} mfa\.[A-Za-z0-9_-]{40,100}
docker            dckr_(?:pat|oat)_[A-Za-z0-9_-]{16,64}
doppler           dp\.(?:pt|st|ct|scim|audit)\.[A-Za-z0-9_.-]{24,96}
dropbox           sl\.(?:u\.)?[A-Za-z0-9_-]{60,1400}
duffel            duffel_(?:test|live)_[A-Za-z0-9_=-]{24,64}
dynatrace         dt0[a-z][0-9]{2}\.[A-Z0-9]{12,24}\.[A-Z0-9]{30,80}
easypost          EZ[AT]K[A-Za-z0-9]{30,80}
elevenlabs        sk_[a-f0-9]{40,64}
facebook          EAA[A-Za-z0-9]{30,400}
figma             fig[dour]_[A-Za-z0-9_-]{20,80}
fireworks         fw_{D}[A-Za-z0-9]{20,40}
flutterwave       FLWSECK(?:_TEST|_LIVE)?-[A-Za-z0-9]{12,64}(?:-X)?
fly.io            fo1_[A-Za-z0-9_-]{24,80} fm[12]r?_[A-Za-z0-9+/=_-]{40,2048}
frame.io          fio-u-[A-Za-z0-9_=-]{30,80}
github            gh[pousr]_[A-Za-z0-9]{20,255} github_pat_[A-Za-z0-9_]{20,255}
gitlab            gl(?:pat|ptt|rt|rtr|cbt|dt|ft|ffct|imt|agent|oas|soat|wt)-[A-Za-z0-9_.=-]{16,300} GR1348941[A-Za-z0-9_-]{16,40}
google            AIza[A-Za-z0-9_-]{30,64} GOCSPX-[A-Za-z0-9_-]{20,64} ya29\.[A-Za-z0-9_-]{20,2048} 1//0[A-Za-z0-9_-]{30,200}
grafana           gl(?:sa|c)_[A-Za-z0-9_+/=-]{24,400}
groq              gsk_{D}[A-Za-z0-9]{20,80}
harness           at.>>[ps]at\.[A-Za-z0-9_-]{22}\.[a-f0-9]{24}\.[A-Za-z0-9]{20}
heroku            HRKU-[A-Za-z0-9_-]{30,80}
hubspot           pat-(?:na|eu|ap)[0-9]-[a-f0-9-]{30,40}
hugging face      hf_{D}[A-Za-z0-9]{20,255} hf_[A-Za-z]{30,255} hf_(?:oauth|jwt)_[A-Za-z0-9._-]{16,2048} api_org_{D}[A-Za-z0-9]{24,64}
infracost         ico-[A-Za-z0-9]{24,40}
intra42           s-s4t2(?:ud|af)-[a-f0-9]{40,80}
json web token    eyJ[A-Za-z0-9_-]{8,2048}\.[A-Za-z0-9_-]{8,4096}(?:\.[A-Za-z0-9_-]{0,2048}){0,3}
kaggle            KGAT_[a-f0-9]{24,64}
langfuse          k-lf->>[sp]k-lf-[a-f0-9-]{24,40}
langsmith         ls(?:v2_(?:pt|sk)_|__)[a-f0-9]{24,64}(?:_[a-f0-9]{8,16})?
launchdarkly      sdk-[a-f0-9]{8}-[a-f0-9-]{14}-[a-f0-9]{12} mob-[a-f0-9]{8}-[a-f0-9-]{14}-[a-f0-9]{12} api-[a-f0-9]{8}-[a-f0-9-]{14}-[a-f0-9]{12}
lightning         lai-{D}[A-Za-z0-9-]{20,64}
linear            lin_(?:api|oauth)_[A-Za-z0-9]{24,80}
mailchimp         -us>>[a-f0-9]{32}-us[0-9]{1,2}
mailgun           key->>(?:pub)?key-[a-f0-9]{32}
mapbox            k.eyJ>>[st]k\.eyJ[A-Za-z0-9_-]{30,200}(?:\.[A-Za-z0-9_-]{10,64})?
modal             ak-{D}(?=[a-z0-9]{0,20}[A-Z])[A-Za-z0-9]{20,40} as-{D}(?=[a-z0-9]{0,20}[A-Z])[A-Za-z0-9]{20,40}
mongodb           mdb_sa_sk_[A-Za-z0-9_-]{20,64}
neon              napi_{D}[a-z0-9]{40,80}
netlify           nf[pouc]_{D}[A-Za-z0-9]{24,64}
new relic         NR(?:AK|JS|II|AA|RA)-[A-Za-z0-9_-]{16,64} NRAL>>[a-f0-9]{36}NRAL
notion            ntn_{D}[A-Za-z0-9]{30,64} secret_(?=[A-Za-z]{0,20}[0-9])[A-Za-z0-9]{32,64}
npm               npm_{D}[A-Za-z0-9]{30,64}
nuget             oy2[a-z0-9]{43}
nvidia            nvapi-[A-Za-z0-9_-]{20,128}
octopus deploy    API-(?=[A-Z]{0,20}[0-9])[A-Z0-9]{24,40}
openai, deepseek  sk-(?:(?:proj|svcacct|admin|None|or-v1|ant-[a-z]{2,8}[0-9]{2})-)?(?=[A-Za-z_-]{0,6}[A-Za-z]{0,24}[0-9])[A-Za-z0-9_-]{16,255}
openshift         sha256~[A-Za-z0-9_-]{30,64}
paypal            access_token\$(?:production|sandbox)\$[a-z0-9]{10,24}\$[a-f0-9]{24,40}
perplexity        pplx-{D}[A-Za-z0-9]{24,64}
pinecone          pcsk_[A-Za-z0-9_]{24,100}
plaid             access-(?:sandbox|development|production)-[a-f0-9-]{30,40}
planetscale       pscale_(?:tkn|oauth|pw)_[A-Za-z0-9_.=-]{24,80}
posthog           ph[cx]_{D}[A-Za-z0-9]{30,64}
postman           PMAK-[a-f0-9]{20,32}-[a-f0-9]{24,40}
prefect           pn[ubs]_{D}[A-Za-z0-9]{24,64}
pulumi            pul-[a-f0-9]{30,64}
putty             Private-Lines:\x20[0-9]{1,3}(?:\s{1,4}[A-Za-z0-9+/=]{16,80}){1,80}
pypi              pypi-[A-Za-z0-9_-]{40,1024}
razorpay          rzp_(?:live|test)_[A-Za-z0-9]{12,40}
readme            rdme_[a-z0-9]{50,90}
render            rnd_{D}[A-Za-z0-9]{24,40}
replicate         r8_{D}[A-Za-z0-9]{24,64}
resend            re_(?=[A-Za-z_]{0,20}[0-9])[A-Za-z0-9]{6,12}_[A-Za-z0-9]{18,32}
rubygems          rubygems_[a-f0-9]{30,64}
runpod            rpa_{D}[A-Z0-9]{24,64}[A-Za-z0-9]{0,16}
scalingo          tk-us-[A-Za-z0-9_-]{30,64}
sendgrid          SG\.[A-Za-z0-9_-]{16,32}\.[A-Za-z0-9_-]{20,64}
sentry            sntry[us]_[A-Za-z0-9+/=_-]{30,400}
settlemint        sm_(?:aat|pat|sat)_[A-Za-z0-9]{12,24}
shippo            shippo_(?:live|test)_[a-f0-9]{24,64}
shopify           shp(?:at|ca|pa|ss)_[A-Fa-f0-9]{20,64}
slack             xox[abceoprs](?:\.xox[bp])?-[A-Za-z0-9-]{10,255} xapp-[0-9]-[A-Za-z0-9-]{20,160} xwfp-[A-Za-z0-9-]{20,160}
sonarqube         sq[pua]_[a-f0-9]{30,64}
sourcegraph       sgp_(?:(?:[a-f0-9]{16}|local)_)?[a-f0-9]{30,64}
square            EAAA[A-Za-z0-9_-]{40,80} sq0[a-z]{3}-[A-Za-z0-9_-]{20,64}
stripe            k_>>[sr]k_(?:live|test|prod)_[A-Za-z0-9]{16,255} whsec_[A-Za-z0-9+/=]{16,255}
supabase          sb[pv]_[a-f0-9]{30,64} sb_secret_[A-Za-z0-9_-]{20,64}
tailscale         tskey-[A-Za-z]{2,12}-[A-Za-z0-9-]{12,100}
telegram          /bot>>/bot([0-9]{6,12}:[A-Za-z0-9_-]{30,40})/ :A>>[0-9]{6,12}:[A-Za-z0-9_-]{30,40}(?![A-Za-z0-9_-])
tencent           AKID[A-Za-z0-9]{28,40}
terraform         .atlasv1.>>[A-Za-z0-9]{10,20}\.atlasv1\.[A-Za-z0-9_=-]{40,100}
together          tgp_v1_[A-Za-z0-9_-]{24,64}
trello            ATTA[a-f0-9]{50,80}
twilio            SK[a-f0-9]{32} AC[a-f0-9]{32}
typeform          tfp_[A-Za-z0-9_.=-]{30,80}
vault             hv[sbr]\.[A-Za-z0-9_-]{20,300} s\.(?=[A-Za-z]{0,16}[0-9])[A-Za-z0-9]{24}(?![A-Za-z0-9])
vercel            vc[pkair]_{D}[A-Za-z0-9]{20,80}
voyage            pa-{D}(?=[a-z0-9_-]{0,20}[A-Z])[A-Za-z0-9_-]{36,64}
weights & biases  wandb_v1_[A-Za-z0-9_]{20,128} local-[a-f0-9]{40}
xai               xai-{D}[A-Za-z0-9]{24,128}
xata              xau_{D}[A-Za-z0-9]{24,64}
yandex            t1\.[A-Za-z0-9_-]{30,100}\.[A-Za-z0-9_-]{60,120} y0_[A-Za-z0-9_-]{50,64} y1_[A-Za-z0-9_-]{50,64} y2_[A-Za-z0-9_-]{50,64} y3_[A-Za-z0-9_-]{50,64} AQVN[A-Za-z0-9_-]{30,50}
discord webhook   discord(?:app)?\.com/api/(?:v[0-9]{1,2}/)?webhooks/([0-9]{10,24}/[A-Za-z0-9_-]{16,120})
feishu webhook    /open-apis/bot/>>(?:feishu\.cn|larksuite\.com)/open-apis/bot/(?:v2/)?hook/([A-Za-z0-9-]{16,64})
google chat       chat\.googleapis\.com/v1/spaces/([^\s"'<>]{16,400})
healthchecks      hc-ping\.com/([A-Za-z0-9-]{16,64})
ifttt webhook     maker\.ifttt\.com/(?:trigger|use)/(?:[^\s"'<>/]{1,64}/){0,4}([A-Za-z0-9_-]{16,80})
mattermost hook   /hooks/([a-z0-9]{26}|[A-Za-z0-9]{17,24}/[A-Za-z0-9]{30,60})(?![A-Za-z0-9])
pagerduty         events\.pagerduty\.com/(?:integration|x-ere)/([A-Za-z0-9]{20,40})
slack webhook     hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/([A-Za-z0-9_/+-]{12,200})
teams webhook     webhook>>(?:[a-z0-9-]{1,64}\.webhook\.office\.com/webhookb2|outlook\.office(?:365)?\.com/webhook)/([^\s"'<>\\]{16,400})
telegram webhook  api\.telegram\.org/(?:file/)?bot([0-9]{5,14}:[A-Za-z0-9_-]{16,64})
webex webhook     webexapis\.com/v1/webhooks/incoming/([A-Za-z0-9_-]{16,128})
zapier webhook    hooks\.zapier\.com/hooks/catch/([0-9]{1,12}/[A-Za-z0-9/]{4,80})
make webhook      hook\.[a-z0-9]{2,5}\.(?:make|integromat)\.com/([a-z0-9]{24,40})
"""

_LITERAL_START = re.compile(r"(?:[A-Za-z0-9_/:-](?![{?*])|\\[.$])*")


def provider_patterns() -> tuple[tuple[str, str], ...]:
    """Return, for each pattern, a text that all its tokens contain, and the regular expression."""
    columns = (pattern for line in _PROVIDERS.splitlines() for pattern in line[18:].split())
    parts = (pattern.rpartition(">>") for pattern in columns)
    return tuple(
        (anchor or "".join(_LITERAL_START.findall(pattern)[:1]).replace("\\", ""), pattern.replace("{D}", _DIGIT_SOON))
        for anchor, _, pattern in parts
    )


# Commands, and their options that are followed by a password. An option that ends in "*" has the password in the same
# word. `login:-p` counts only after the word "login" or "alias", and `login:*` is the argument after it. An option whose name
# tells that it takes a password, such as --password, is found without this table.
_COMMANDS = """
curl           -u -u* -su -ku -Lu -sSu --user -U --proxy-user --oauth2-bearer --pass -b
wget           --http-password --ftp-password --proxy-password
http https     -a --auth
sshpass        -p -p*
ssh-keygen     -N
mysql mysqldump mysqladmin mysqlimport mysqlsh mariadb mariadb-dump  -p*
mongo mongosh mongodump mongorestore mongoimport mongoexport         -p -p*
redis-cli      -a
sqlcmd bcp     -P -P*
docker podman nerdctl skopeo buildah helm oras crane az              login:-p
ldapsearch ldapadd ldapmodify ldapwhoami ldappasswd                  -w
unzip zip      -P -P*
7z 7za 7zz     -p*
rar unrar      -p* -hp*
openssl        -k -K -passin -passout -pass
keytool jarsigner  -storepass -keypass
smbclient rpcclient smbmap  -U
lftp ncftp     -u
plink pscp psftp   -pw
xfreerdp       /p:*
rdesktop       -p
ipmitool       -P
snmpget snmpwalk   -A -X
wandb vault mc mcli    login:*
oathtool       -b --base32 --totp
"""


def command_options() -> dict[str, frozenset[str]]:
    """Return, for each command in the table, its options that are followed by a password."""
    options: dict[str, frozenset[str]] = {}
    for line in _COMMANDS.splitlines():
        words = line.split()
        names = [word for word in words if not word.startswith(("-", "/")) and ":" not in word]
        options |= dict.fromkeys(names, frozenset(words) - frozenset(names))
    return options
